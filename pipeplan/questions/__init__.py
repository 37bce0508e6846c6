"""The inverse questions: how few devices, how large a model, and how the best plan changes with one value."""
