"""The sub-commands of `pipeplan-agent`, a file each. Heavy imports stand inside the functions that need them."""
