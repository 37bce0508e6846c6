"""PipeDream's planner: stages of unequal replicas, on levels of a network, of chains and of graphs."""
