"""A schedule is data: a stream of instructions for every worker, generated once and read by everything else."""
