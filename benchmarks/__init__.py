"""Measurements with fixed work, each beside a peer in the same run. Ratios count; absolute times are this machine's."""
