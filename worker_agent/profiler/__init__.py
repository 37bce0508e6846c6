"""The profiler: what a model's blocks cost in time and memory, and what lies between two devices, measured here."""
