"""The sub-commands of `pipeplan`, a file each. Heavy imports stand inside the functions that need them."""
