"""The sub-commands of `pipeplan-agent`, a file each. Heavy imports are inside the functions that need them."""
