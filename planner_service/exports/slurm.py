"""Slurm: a script for sbatch; srun starts `pipeplan-agent run` once on every node."""

from planner_service.exports.comments import commented
from planner_service.exports.node_script import RUN, nodes_of, notes_of, plan_file, require_chain, settings_of
from planner_service.exports.source import Source

_START = """srun --ntasks-per-node=1 --kill-on-bad-exit=1 pipeplan-agent run {run} "$@"
"""

_START_TOGETHER = """MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun --ntasks-per-node=1 --kill-on-bad-exit=1 \\
  bash -c 'exec pipeplan-agent run --node-rank "$SLURM_NODEID" "$@"' node {run} \\
  --nodes {nodes} --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" "$@"
"""


def write(source: Source) -> str:
    """The script. Raises InvalidInputError where the plan cannot be executed so."""
    require_chain(source)
    nodes = nodes_of(source)
    options = [f"--job-name=pipeplan-{source.short_id}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    if "cpu" not in source.cluster.device.name.lower():
        options.append(f"--gpus-per-node={source.plan.workers // nodes}")
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    notes = [
        *source.heading,
        *notes_of(source, "The script's arguments"),
        "Partition, account and time limit are the site's: add them to sbatch.",
    ]
    place = 'mkdir -p "$OUT"\nPLAN_FILE="$OUT/submitted-plan.json"\n'
    start = _START if nodes == 1 else _START_TOGETHER
    body = "set -euo pipefail\n" + settings_of(source) + place + plan_file(source)
    return "#!/usr/bin/env bash\n" + directives + commented(notes) + body + start.format(run=RUN, nodes=nodes)
