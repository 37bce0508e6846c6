"""The planner auto: the other planners' proposals, ranked by the play of their streams."""
