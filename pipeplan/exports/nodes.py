"""Nodes: scripts that execute a plan. torchrun, Slurm and Kubernetes start one on every node.

Such a script calls `pipeplan-agent run`, on one node or as a part of several, and takes all options of this command.
`write_torchrun` writes a script to start once on every node. `write_slurm` writes a script for sbatch; its srun starts
the command once on every node. `kubernetes` has the third script. These and the other exports describe a plan in the
target's own comment lines (`commented`). No text of a document can escape from such a line.
"""

import shlex

from pipeplan.documents.engines import OUR_RUNTIME
from pipeplan.documents.identity import canonical_json
from pipeplan.errors import InvalidInputError
from pipeplan.exports.source import ExportSource, require_engine

_SETTINGS = """{model}
: "${{DATA:?name the data: preset:NAME or package.module:factory, such as preset:random_tokens}}"
: "${{STEPS:?say how many batches to train}}"
OUT="${{OUT:-$PWD/run-{short}}}"
"""

_DEFAULT_MODEL = """default_model={spec}
MODEL="${{MODEL:-$default_model}}\""""

_NO_MODEL = """if [ -z "${{MODEL:-}}" ]; then
  printf '%s\\n' {refusal} >&2
  exit 2
fi"""

RUN = """--plan "$PLAN_FILE" --model "$MODEL" --data "$DATA" --steps "$STEPS" \\
  --seed "${SEED:-0}" --out "$OUT" \\
  ${LEARNING_RATE:+--learning-rate "$LEARNING_RATE"}"""
"""The arguments of `pipeplan-agent run` that the environment sets."""

_TOGETHER = """: "${{MASTER_ADDR:?name the node of rank 0}}"
NODE_RANK="${{NODE_RANK:-${{SLURM_NODEID:-${{JOB_COMPLETION_INDEX:-}}}}}}"
: "${{NODE_RANK:?number the nodes from 0}}"
exec pipeplan-agent run {run} \\
  --nodes {nodes} --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" "$@"
"""

_SRUN = """srun --ntasks-per-node=1 --kill-on-bad-exit=1 pipeplan-agent run {run} "$@"
"""

_SRUN_TOGETHER = """MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
srun --ntasks-per-node=1 --kill-on-bad-exit=1 \\
  bash -c 'exec pipeplan-agent run --node-rank "$SLURM_NODEID" "$@"' node {run} \\
  --nodes {nodes} --master-addr "$MASTER_ADDR" --master-port "${{MASTER_PORT:-29500}}" "$@"
"""


def commented(lines: list[str]) -> str:
    """Comment lines of a shell script, YAML, TOML or Python: one for each text, with unprintable characters escaped."""
    return "".join(f"# {printable(line)}\n" for line in lines)


def printable(text: str) -> str:
    """The text on one line, in characters that every target reads; others are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def settings_of(source: ExportSource) -> str:
    """Lines that take MODEL, DATA, STEPS and OUT from the environment, or refuse to go on.

    MODEL has a default only where every agent builds the model from pipeplan's own code. Other code that a document
    names runs only if the user who starts the script names it too.
    """
    spec = source.spec
    if spec is not None and spec.is_built_in:
        model = _DEFAULT_MODEL.format(spec=shlex.quote(spec.text))
    else:
        named = printable(source.plan.model.spec or "none")
        refusal = f"MODEL: name the model, as hf:FAMILY?key=value or package.module:factory; the profile names {named}"
        model = _NO_MODEL.format(refusal=shlex.quote(refusal))
    return _SETTINGS.format(model=model, short=source.short_id)


def plan_file(source: ExportSource) -> str:
    """Lines that write the plan's document to PLAN_FILE.

    The document is one line of ASCII that begins with a brace: it cannot be the line that ends the text.
    """
    return f"cat > \"$PLAN_FILE\" <<'PLAN'\n{plan_json(source)}\nPLAN\n"


def plan_json(source: ExportSource) -> str:
    """The plan's document as one line of printable ASCII."""
    return canonical_json(source.plan).replace("\x7f", "\\u007f")


def run_lines(source: ExportSource) -> str:
    """The call of `pipeplan-agent run`, with the script's own arguments after it."""
    nodes = nodes_of(source)
    if nodes == 1:
        return f'exec pipeplan-agent run {RUN} "$@"\n'
    return _TOGETHER.format(run=RUN, nodes=nodes)


def require_chain(source: ExportSource) -> None:
    """Raises InvalidInputError for a plan that the executor cannot run."""
    plan = source.plan
    require_engine(source, "executed by pipeplan-agent", OUR_RUNTIME)
    if plan.order not in (None, tuple(range(plan.stages[-1].stop))):
        rule = "cannot be executed: the executor runs chains, and this plan's stages have an order of their own"
        raise InvalidInputError("format", rule, list(plan.order or ()))


def nodes_of(source: ExportSource) -> int:
    """How many nodes the plan's workers take. Raises InvalidInputError if they cannot be spread evenly."""
    workers, a_node = source.plan.workers, source.devices_a_node
    if workers <= a_node:
        return 1
    if workers % a_node:
        rule = (
            f"cannot be started by torchrun, which starts as many processes on every node: nodes have {a_node} devices"
        )
        raise InvalidInputError("format", rule, f"{workers} workers")
    return workers // a_node


def notes_of(source: ExportSource, arguments: str) -> list[str]:
    """The comments on what to set before the start; `arguments` says where the command's options go."""
    nodes = nodes_of(source)
    spec = source.spec
    required = "DATA and STEPS" if spec is not None and spec.is_built_in else "MODEL, DATA and STEPS"
    notes = [
        f"Set {required} in the environment; OUT, SEED and LEARNING_RATE have defaults.",
        f"{arguments} are options of `pipeplan-agent run`: --resume, --clip-norm, --lr-schedule, ...",
    ]
    if nodes == 1:
        return notes
    together = f"{nodes} nodes take part: OUT must be a folder that all of them see; ranks are numbered node by node."
    return [*notes, together]


def write_torchrun(source: ExportSource) -> str:
    """The script. Raises InvalidInputError if the plan cannot be executed in this way."""
    require_chain(source)
    notes = commented([*source.heading, *notes_of(source, "The script's arguments")])
    body = "set -euo pipefail\n" + settings_of(source) + 'PLAN_FILE="$(mktemp)"\n' + plan_file(source)
    return "#!/usr/bin/env bash\n" + notes + body + run_lines(source)


def write_slurm(source: ExportSource) -> str:
    """The script. Raises InvalidInputError if the plan cannot be executed in this way."""
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
    start = _SRUN if nodes == 1 else _SRUN_TOGETHER
    body = "set -euo pipefail\n" + settings_of(source) + place + plan_file(source)
    return "#!/usr/bin/env bash\n" + directives + commented(notes) + body + start.format(run=RUN, nodes=nodes)
