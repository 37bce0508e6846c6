"""Documents: profiles and clusters, stored by content."""
