"""The pipeline runtime: one loop over the instruction streams, on torch.distributed and torchrun."""
