"""The planner auto: what the others propose, ranked by the play of its streams."""
