"""Where arrays live on the devices, which sizes are compiled, and what compiling costs."""
