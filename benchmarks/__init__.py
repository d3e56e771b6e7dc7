"""Side by side with plain JAX, hand-written modules and peers: `python -m benchmarks`."""
