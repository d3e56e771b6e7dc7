"""Comparisons with plain JAX, hand-written modules and other libraries: `python -m benchmarks`."""
