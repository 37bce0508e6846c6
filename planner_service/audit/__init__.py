"""Audit: the log of who did what: its entries for refused attempts, and its reading."""
