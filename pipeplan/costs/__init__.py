"""Costs: closed-form models, a term a file, and the costs with which the simulator plays a program."""
