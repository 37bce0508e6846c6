"""Schedules: the compute and the updates of one worker, in order. A file each; `registry` has them all."""
