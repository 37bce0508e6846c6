"""Simulation: plays programs with costs, and shows the timelines."""
