"""Overview: pages and routes that show several nouns at once, or none."""
