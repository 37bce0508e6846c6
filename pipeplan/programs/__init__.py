"""Programs: a schedule as data, one stream of instructions for every worker, and what reads or rewrites streams."""
