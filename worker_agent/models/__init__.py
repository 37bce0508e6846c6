"""What can be trained: models as chains of blocks, data as microbatches, losses; each named by a SPEC."""
