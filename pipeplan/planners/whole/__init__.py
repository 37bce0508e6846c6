"""The whole space: tensor, sequence, context, expert, pipeline and data parallelism, sharded states, recomputation."""
