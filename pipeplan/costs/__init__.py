"""Closed-form cost models, a term a file, and the costs that the simulator plays a program with."""
