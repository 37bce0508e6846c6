"""Imports: profiles from other systems' files."""
