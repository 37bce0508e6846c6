"""The sub-commands of `pipeplan`, a file each. Heavy imports are inside the functions that need them."""
