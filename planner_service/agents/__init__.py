"""Agents: the nodes that do the work."""
