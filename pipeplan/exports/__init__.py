"""Exports: plans in the formats of other systems."""
