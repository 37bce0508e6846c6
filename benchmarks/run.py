"""All measurements of docs/benchmarks.md, one after another: `make bench`."""

from benchmarks import (
    auto,
    data_parallel,
    exact,
    executor,
    memory,
    partition,
    pipelines,
    prediction,
    search,
    simulation,
    split_backward,
    two_bp,
)


def main() -> None:
    """Prints every table."""
    print("## The executor beside torch's own\n", flush=True)
    pipelines.main()
    print("\n## Data parallelism beside torch's DistributedDataParallel\n", flush=True)
    data_parallel.main()
    print("\n## What the executor adds to an instruction\n", flush=True)
    executor.main()
    print("\n## Peak memory, predicted and measured\n", flush=True)
    memory.main()
    print("\n## Predicted against measured\n", flush=True)
    prediction.main()
    print("\n## 2BP: what the split costs\n", flush=True)
    split_backward.main()
    print("\n## 2BP against its table 1\n", flush=True)
    two_bp.main()
    print("\n## How fast PipeDream's partition is found\n", flush=True)
    partition.main()
    print("\n## What the solver proves\n", flush=True)
    exact.main()
    print("\n## How fast streams are played\n", flush=True)
    simulation.main()
    print("\n## What auto finds\n", flush=True)
    auto.main()
    print("\n## How fast 2BW and GPipe are planned\n", flush=True)
    search.main()


if __name__ == "__main__":
    main()
