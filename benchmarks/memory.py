"""Peak memory a rank, predicted and measured: `python -m benchmarks.memory [--model NAME] [CASE...]`.

A profile of the model (of `MODELS`) is measured; every case is planned from it and run. Predicted: the most that the
plan's streams hold when they are played (weight versions, gradients, optimizer states, activations), and the buffers of
messages under way. Measured: what the C library has allocated between instructions, above what was there before the
model was built and the rank's context (see `memory_rank`), which has a column of its own; nothing of the runtime's own
accounts is in it. A backward that recomputes by block is looked into as well.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed.launcher.api import elastic_launch

from pipeplan.costs.graph import boundaries
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import read
from pipeplan.documents.plan import ClosedForm, Plan, Stage
from pipeplan.documents.profile import Profile
from pipeplan.planners.complete import Decision, complete
from pipeplan.planners.problem import Options, PlanningProblem
from pipeplan.programs.in_transit import in_transit, windows
from pipeplan.programs.program import Program, pipelines_in_a_row
from pipeplan.simulation.predict import predict, program_of
from worker_agent.engine.torchrun import one_node
from worker_agent.runtime.job import RunJob, write_job

OPTIMIZER = "adam"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Trained:
    """A model, its data, and the cuts between its four stages, where a benchmark has these."""

    model: str
    data: str
    cuts: tuple[int, ...] = ()
    microbatch_size: int = 4


TOKENS = "worker_agent.models.text:random_tokens?sequence_length=128"
LAYERS = "num_hidden_layers=8&hidden_size=256&num_attention_heads=8&intermediate_size=768&vocab_size=256"
MODELS = {
    "gpt2": Trained("hf:gpt2?n_layer=8&n_embd=256&n_head=8&vocab_size=256&n_positions=128", TOKENS, (0, 3, 5, 7, 10)),
    "llama": Trained(f"hf:llama?{LAYERS}&num_key_value_heads=4&max_position_embeddings=128", TOKENS, (0, 3, 5, 7, 10)),
    "bert": Trained(f"hf:bert?{LAYERS}&max_position_embeddings=128", TOKENS, (0, 3, 5, 7, 10)),
    "resnet": Trained(
        "preset:resnet50?scale=0.5&image_size=128", "preset:random_images?size=128&samples=8", (0, 3, 6, 11, 18), 8
    ),
    "vgg": Trained(
        "preset:vgg16?scale=0.25&image_size=64", "preset:random_images?size=64&samples=8", (0, 2, 4, 7, 16), 8
    ),
    "lstm": Trained(
        "preset:gnmt?layers=6&hidden=128&vocabulary=512",
        "preset:random_translations?vocabulary=512",
        (0, 4, 8, 11, 15),
        8,
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A schedule and its options, on four stages."""

    name: str
    schedule: str
    microbatches: int = 8
    recompute: bool = False
    recompute_unit: str = "stage"
    split_backward: bool = False
    half_way: bool = False
    concatenate: bool = False
    chunks: int = 1
    batches: int = 3


CASES = (
    Case("naive", "naive", microbatches=2),
    Case("gpipe", "gpipe"),
    Case("gpipe, recomputing", "gpipe", recompute=True),
    Case("gpipe, recomputing by block", "gpipe", recompute=True, recompute_unit="block"),
    Case("1f1b", "1f1b"),
    Case("1f1b, recomputing", "1f1b", recompute=True),
    Case("1f1b, recomputing by block", "1f1b", recompute=True, recompute_unit="block"),
    Case("pipedream", "pipedream", microbatches=1, batches=12),
    Case("pipedream, vertical sync", "pipedream-vertical-sync", microbatches=1, batches=12),
    Case("pipedream-2bw", "pipedream-2bw"),
    Case("naive, 2BP", "naive", microbatches=2, split_backward=True),
    Case("gpipe, 2BP", "gpipe", split_backward=True),
    Case("gpipe, 2BP concatenated", "gpipe", split_backward=True, concatenate=True),
    Case("1f1b, 2BP", "1f1b", split_backward=True),
    Case("1f1b, 2BP half-way", "1f1b", split_backward=True, half_way=True),
    Case("zb-h1", "zb-h1"),
    Case("1f1b-interleaved", "1f1b-interleaved", chunks=2),
)


def plan_for(case: Case, trained: Trained, profile: Profile, cluster: Cluster, optimizer: str = OPTIMIZER) -> Plan:
    """The case's plan, with the costs that the profile gives it."""
    cuts, depth = trained.cuts, len(trained.cuts) - 1
    batch_size = trained.microbatch_size * case.microbatches
    decision = Decision(
        planner="benchmark",
        cost_model="simulated",
        stages=tuple(
            Stage(start=cuts[s], stop=cuts[s + 1], recompute=case.recompute, recompute_unit=case.recompute_unit)
            for s in range(depth)
        ),
        placement=pipelines_in_a_row((1,) * depth),
        schedule="1f1b" if case.schedule == "1f1b-interleaved" else case.schedule,
        microbatch_size=trained.microbatch_size,
        microbatches=case.microbatches,
        batch_size=batch_size,
        closed_form=ClosedForm(time_per_microbatch_s=1.0, throughput_samples_per_s=1.0, bubble_fraction=0.0),
        optimal_in_flight=depth,
        configurations_considered=1,
    )
    problem = PlanningProblem(
        profile=profile, cluster=cluster, batch_size=batch_size, options=Options(optimizer=optimizer)
    )
    return replace(
        complete(problem, decision),
        schedule=case.schedule,
        chunks=case.chunks,
        placement=pipelines_in_a_row((1,) * (depth // case.chunks)),
        split_backward=case.split_backward,
        split_backward_half_way=case.half_way,
        simulated=None,
    )


def predicted_bytes(plan: Plan, profile: Profile, batches: int) -> list[int]:
    """The peak of every rank: the most that it holds in the play, and in transit, after any instruction."""
    program = program_of(plan, batches=batches)
    messages = _messages_bytes(plan, profile, program)
    peaks = []
    for stream, lane in zip(program.streams, predict(plan, batches=batches).lanes, strict=True):
        following = [messages[part.stage] for part in program.stage_streams(stream)]
        now_bytes, most_bytes = [0] * len(following), 0
        for instruction, held_bytes in zip(stream.instructions, lane.memory_bytes, strict=True):
            now_bytes[instruction.chunk] = next(following[instruction.chunk])
            most_bytes = max(most_bytes, held_bytes + sum(now_bytes))
        peaks.append(most_bytes)
    return peaks


def _messages_bytes(plan: Plan, profile: Profile, program: Program) -> dict[int, Iterator[int]]:
    """By stage, what is in transit after each of its instructions."""
    parts = {part.stage: part for stream in program.streams for part in program.stage_streams(stream)}
    by_stage = {}
    for stage, moved in enumerate(boundaries(profile, plan.microbatch_size, plan.stages, plan.order)):
        counts = in_transit(
            parts[stage].instructions,
            windows=windows(program, parts[stage]),
            recompute=plan.recompute,
            by_block=plan.recomputes_by_block,
        )
        sizes = moved.received_bytes, moved.sent_bytes, moved.kept_output_bytes
        by_stage[stage] = iter([each.bytes(*sizes) for each in counts])
    return by_stage


def measured_bytes(case: Case, trained: Trained, plan: Plan, folder: Path) -> tuple[list[int], list[int]]:
    """The peak of every rank's heap, and what is beside it: the rank's context."""
    job = RunJob(
        plan=plan,
        model=trained.model,
        data=trained.data,
        steps=case.batches,
        learning_rate=1e-3,
        out=str(folder),
        device="cpu",
        concatenate=case.concatenate,
    )
    path = write_job(job)
    elastic_launch(one_node(plan.workers), sys.executable)("-m", "benchmarks.memory_rank", str(path))
    found = [json.loads(path.with_name(f"{rank}.json").read_text()) for rank in range(plan.workers)]
    return [int(peak) for peak, _ in found], [int(context) for _, context in found]


def main(model: str = "gpt2", chosen: Sequence[str] = ()) -> None:
    """Prints a row a case, of all or of some by name; an error above 0 is a rank that held more than is predicted."""
    trained = MODELS[model]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile, cluster = _profiled(trained, folder)
        print(f"{trained.model}, {len(trained.cuts) - 1} stages, {OPTIMIZER}\n")
        print("| | predicted MiB, by rank | measured MiB, by rank | errors | contexts, MiB |\n|---|---|---|---|---|")
        for case in (case for case in CASES if not chosen or case.name in chosen):
            plan = plan_for(case, trained, profile, cluster)
            predicted = predicted_bytes(plan, profile, case.batches)
            measured, contexts = measured_bytes(case, trained, plan, folder / case.name.replace(" ", "-"))
            errors = [m / p - 1 for p, m in zip(predicted, measured, strict=True)]
            cells = [" / ".join(f"{size / MIB:.1f}" for size in sizes) for sizes in (predicted, measured, contexts)]
            cells.insert(2, f"{min(errors):+.1%} to {max(errors):+.1%}")
            print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def _profiled(trained: Trained, folder: Path) -> tuple[Profile, Cluster]:
    profile, cluster = folder / "profile.json", folder / "cluster.json"
    sizes = ("--devices", "1", "--microbatch-sizes", str(trained.microbatch_size), "--rounds", "2")
    files = ("--optimizer", OPTIMIZER, "-o", str(profile), "--cluster-output", str(cluster), "--json")
    command = ("-m", "worker_agent", "profile", "--model", trained.model, "--data", trained.data, *sizes, *files)
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
    alone = read(Cluster, cluster)
    return read(Profile, profile), replace(alone, levels=(replace(alone.levels[0], size=len(trained.cuts) - 1),))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("cases", nargs="*", metavar="CASE")
    asked = parser.parse_args()
    main(asked.model, asked.cases)
