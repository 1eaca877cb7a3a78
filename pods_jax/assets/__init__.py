"""The bundled model: its files, and the scripts that made them."""
