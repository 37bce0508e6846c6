"""Measured iterations of real clusters beside what is predicted for them: `python -m benchmarks.truth FILE...`."""
