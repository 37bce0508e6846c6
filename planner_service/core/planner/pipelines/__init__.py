"""Planners of pipelines whose stages have equal replicas: PipeDream-2BW and GPipe."""
