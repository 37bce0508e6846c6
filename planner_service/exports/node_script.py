"""NodeScript: what every node runs to execute the plan with pipeplan-agent; torchrun, Slurm and Kubernetes start it.

On one node `pipeplan-agent run` does everything. On several, torchrun starts the same ranks on each node, from a job
file in a folder that all of them see.
"""

import shlex

from planner_service.core.errors import InvalidInputError
from planner_service.core.identity import canonical_json
from planner_service.exports.source import Source

_HEAD = """set -euo pipefail
default_model={model}
MODEL="${{MODEL:-$default_model}}"
: "${{MODEL:?name the model: hf:FAMILY?key=value or package.module:factory}}"
: "${{DATA:?name the data: package.module:factory, such as worker_agent.models.text:random_tokens}}"
: "${{STEPS:?say how many batches to train}}"
OUT="${{OUT:-$PWD/run-{short}}}"
PLAN_FILE="$(mktemp)"
cat > "$PLAN_FILE" <<'PLAN'
{plan}
PLAN
"""

_ALONE = """exec pipeplan-agent run --plan "$PLAN_FILE" --model "$MODEL" --data "$DATA" --steps "$STEPS" \\
  --seed "${SEED:-0}" --learning-rate "${LEARNING_RATE:-0.1}" --out "$OUT" "$@"
"""

_TOGETHER = """: "${{MASTER_ADDR:?name the node of rank 0}}"
NODE_RANK="${{NODE_RANK:-${{SLURM_NODEID:-${{JOB_COMPLETION_INDEX:-}}}}}}"
: "${{NODE_RANK:?number the nodes from 0}}"
JOB_FILE="$(MODEL="$MODEL" DATA="$DATA" STEPS="$STEPS" OUT="$OUT" PLAN_FILE="$PLAN_FILE" python3 - <<'JOB'
import os
from pathlib import Path

from planner_service.contract.documents import read
from planner_service.core.plan import Plan
from worker_agent.runtime.job import RunJob, write_job

given = os.environ
job = RunJob(
    plan=read(Plan, Path(given["PLAN_FILE"])),
    model=given["MODEL"],
    data=given["DATA"],
    steps=int(given["STEPS"]),
    seed=int(given.get("SEED", "0")),
    learning_rate=float(given.get("LEARNING_RATE", "0.1")),
    out=given["OUT"],
)
print(write_job(job))
JOB
)"
exec torchrun --nnodes {nodes} --nproc-per-node {processes} --node-rank "$NODE_RANK" \\
  --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" \\
  -m worker_agent.runtime.start "$JOB_FILE" $$
"""


def node_script(source: Source) -> str:
    """The script's lines behind its first one. Raises InvalidInputError for plans that cannot be executed so."""
    plan = source.plan
    if plan.order not in (None, tuple(range(plan.stages[-1].stop))):
        rule = "cannot be executed: the executor runs chains, and this plan's stages take a graph's blocks in an order"
        raise InvalidInputError("format", rule, list(plan.order or ()))
    head = _HEAD.format(
        model=shlex.quote(plan.model.spec or ""), short=source.plan_id[:8], plan=canonical_json(source.plan)
    )
    nodes = nodes_of(source)
    if nodes == 1:
        return head + _ALONE
    return head + _TOGETHER.format(nodes=nodes, processes=plan.workers // nodes)


def nodes_of(source: Source) -> int:
    """How many nodes the plan's workers take. Raises InvalidInputError where they cannot be spread evenly."""
    workers, a_node = source.plan.workers, source.devices_a_node
    if workers <= a_node:
        return 1
    if workers % a_node:
        rule = f"cannot be started by torchrun: it starts as many processes on every node, and nodes have {a_node}"
        raise InvalidInputError("format", rule, f"{workers} workers")
    return workers // a_node


def notes_of(source: Source) -> list[str]:
    """What must be known before it is started."""
    nodes = nodes_of(source)
    given = "Set DATA and STEPS (and MODEL, OUT, SEED, LEARNING_RATE where the defaults do not do) in the environment."
    if nodes == 1:
        return [given]
    return [
        given,
        f"{nodes} nodes take part: OUT must be a folder that all of them see, and ranks are numbered node by node.",
        "torchrun starts the ranks directly: OUT gets checkpoints, logs and each rank's measurements, no run.json.",
    ]


def commented(lines: list[str]) -> str:
    """Comment lines of a shell script, YAML or TOML."""
    return "".join(f"# {line}\n" for line in lines)
