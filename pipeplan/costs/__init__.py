"""Costs: closed-form models, one term in each file, and the costs with which the simulator plays a program."""
