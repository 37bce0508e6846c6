"""Measurements with fixed work, each beside a peer in the same run. Only ratios count; absolute times are this
machine's.
"""
