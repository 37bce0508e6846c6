"""Processes that answer one question at a time, within their memory and time."""
