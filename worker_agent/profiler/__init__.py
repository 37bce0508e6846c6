"""The profiler: measures the time and memory of a model's blocks, and the links between devices."""
