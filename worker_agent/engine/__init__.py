"""The engine room that profiler and runtime share: ranks and devices, clocks, the split backward, exchanges."""
