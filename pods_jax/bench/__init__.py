"""Benchmarks of the parts of a step: ``python -m pods_jax.bench rollout|step|update|tradeoff|flops|selector``.

Each command compiles first and says how long that took, measures in turns (A B A B) so that noise falls on all alike, prints
wall and CPU seconds in a table, states the floor that the arithmetic sets on this machine, and ends with one JSON line.
"""
