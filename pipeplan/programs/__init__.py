"""Programs: a schedule as data, a stream of instructions for every worker, and all that reads or rewrites them."""
