"""Planners: a problem in, an answer out. All have the one type `problem.Planner`."""
