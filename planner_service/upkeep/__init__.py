"""Upkeep: the service's own scheduled work, and its commands on the database."""
