"""Jobs: a queue, leased by agents and by the service itself."""
