"""Overview: what shows several nouns at once, or none."""
