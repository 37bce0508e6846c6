"""Inputs of training: models as chains of blocks, data as microbatches, losses; each named by a SPEC."""
