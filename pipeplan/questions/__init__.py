"""The questions the other way round: how few devices, how large a model, and what changes with what."""
