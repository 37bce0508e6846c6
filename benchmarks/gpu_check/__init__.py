"""One check of everything that a GPU is needed for: `make gpu-check`, or `python -m benchmarks.gpu_check`.

It needs torch, numpy and safetensors alone, fetches nothing, and says what it leaves out. Every part runs in a process
of its own with a share of the time, and one JSON file holds all that was found so far. Without a GPU the same parts run
in a short form on the CPU.
"""
