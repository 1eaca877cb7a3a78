"""Generating completions: sampling, the engine, and text."""
