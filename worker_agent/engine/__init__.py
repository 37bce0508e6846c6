"""The engine that profiler and runtime share: devices, clocks, channels, the split backward, exchanges."""
