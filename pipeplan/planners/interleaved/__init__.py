"""Interleaved: blocks on ranks that hold several stages each, in a loop or in a V."""
