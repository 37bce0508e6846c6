"""Processes that work for a process of the service: each answers one question at a time, within its memory and time.

pool ──▶ worker (the parent's side) ──questions, pickled──▶ child ──messages, pickled──▶ worker ──▶ pool
"""
