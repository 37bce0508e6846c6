"""PipeDream-2BW's planner: pipelines whose stages have equal replicas."""
