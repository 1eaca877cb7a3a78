"""Kept rollouts in, new parameters and metrics out."""
