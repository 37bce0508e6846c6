"""`python -m worker_agent.profiler.links_rank FILE REPEATS PARENT`: a process that measures its link to the next."""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from pipeplan.documents.files import dump
from worker_agent.engine.devices import describe, place, with_context
from worker_agent.engine.processes import exit_with_parent
from worker_agent.profiler.links import measure_links
from worker_agent.profiler.node_links import MeasuredLinks, RankLink


def main() -> None:
    """Measures with all others; the first rank writes all results."""
    found, repeats = Path(sys.argv[1]), int(sys.argv[2])
    exit_with_parent(int(sys.argv[3]))
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    device = place("auto", int(os.environ["LOCAL_RANK"]), local)
    described = describe(device, local)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    link = measure_links(device, repeats=repeats)
    own = RankLink(
        device=with_context(described, device, local),
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s if link else None,
        latency_s=link.latency_s if link else None,
    )
    everybody: list[RankLink | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    if dist.get_rank() == 0:
        measured = MeasuredLinks(ranks=tuple(one for one in everybody if one is not None))
        aside = found.with_suffix(".part")
        aside.write_text(dump(measured), encoding="utf-8")
        aside.replace(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
