"""The main job on one machine: profile, plan, run, compare, through a service and an agent that it starts."""
