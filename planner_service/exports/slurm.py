"""Slurm: a script for sbatch; srun starts the plan's processes, one torchrun a node."""

from planner_service.exports.node_script import commented, node_script, nodes_of, notes_of
from planner_service.exports.source import Source

_BODY = """set -euo pipefail
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}"
NODE_SCRIPT="$PWD/run-{short}-$SLURM_JOB_ID.sh"
cat > "$NODE_SCRIPT" <<'NODE'
{script}NODE
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash "$NODE_SCRIPT"
"""


def write(source: Source) -> str:
    """The script. Raises InvalidInputError where the plan cannot be executed so."""
    nodes = nodes_of(source)
    options = [f"--job-name=pipeplan-{source.plan_id[:8]}", f"--nodes={nodes}", "--ntasks-per-node=1"]
    if "cpu" not in source.cluster.device.name.lower():
        options.append(f"--gpus-per-node={source.plan.workers // nodes}")
    directives = "".join(f"#SBATCH {option}\n" for option in options)
    notes = [source.title, *notes_of(source), "Partition, account and time limit are the site's: add them to sbatch."]
    body = _BODY.format(short=source.plan_id[:8], script=node_script(source))
    return "#!/usr/bin/env bash\n" + directives + commented(notes) + body
