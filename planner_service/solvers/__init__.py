"""The planners together: the core's own, and those that need a solver."""
