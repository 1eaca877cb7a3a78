"""The decoder, the families it covers, and weights in and out of Hugging Face folders."""
