"""Access: callers, their credentials, and repeated requests."""
