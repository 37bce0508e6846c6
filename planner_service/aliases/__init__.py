"""Aliases: names that point at plans."""
