"""The library: profiles, clusters and plans, the schedules' programs, what they cost, and the planners."""
