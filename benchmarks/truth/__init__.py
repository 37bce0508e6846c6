"""Measured iterations of real clusters beside their predictions: `python -m benchmarks.truth FILE...`."""
