"""What pipeplan knows, without a side effect: standard library and numpy only."""
