"""Predictions: what `pipeplan solve` answers to a row's question, with the row's degrees forced.

The estimate is the agent's (`profile_with_forms`), the plan `solve`'s, on the named cluster. Where nothing fits, the
same question is asked of devices with endless memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.truth.rows import GIB, Row
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.plan import Plan
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, PipeplanError, require
from pipeplan.planners.complete import play
from pipeplan.planners.problem import PlanningProblem
from pipeplan.planners.solve import solve
from pipeplan.protocol.estimates import datasheet_of, forms_asked, microbatch_sizes
from pipeplan.protocol.jobs import ProfileTask
from worker_agent.profiler.datasheets import find_datasheet
from worker_agent.profiler.forms import profile_with_forms

ENDLESS_BYTES = 2**50

LONGEST = 2_000_000
"""So many instructions are played of a row whose batches planners would not play."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted of a row. Errors are relative, above 0 where more was predicted than measured."""

    row: Row
    seconds: float
    memory_gib: float
    fits: bool
    plan: Plan

    @property
    def error(self) -> float | None:
        """Of the seconds; None if the row has none, or none that are clean."""
        return self.seconds / self.row.seconds - 1 if self.row.seconds and self.row.clean else None

    @property
    def memory_error(self) -> float | None:
        """Of the fullest device's bytes, where they are published."""
        return None if self.row.memory_gib is None else self.memory_gib / self.row.memory_gib - 1


def predictions(rows: Sequence[Row]) -> Iterator[tuple[Row, Prediction | PipeplanError]]:
    """For every row a prediction, or why there is none. Rows of one model are estimated together."""
    together: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        together[
            row.spec, row.gpu, row.program, row.precision, row.dtype, row.options.tensor, row.options.expert
        ].append(row)
    for group in together.values():
        profiles: dict[object, Profile | PipeplanError] = {}
        for row in group:
            try:
                yield row, _predicted(row, profiles)
            except PipeplanError as error:
                yield row, error


def _predicted(row: Row, profiles: dict[object, Profile | PipeplanError]) -> Prediction:
    require(bool(row.spec), "model", "must be a model whose sizes are known here", row.model)
    sizes = microbatch_sizes(row.batch, row.sequence_length, row.options.microbatch_size)
    cluster, options = row.cluster, row.options
    asked = forms_asked(
        cluster, options, batch_size=row.batch, sequence_length=row.sequence_length, precision=row.precision
    )
    assert asked is not None, "other engines share blocks"
    asked = replace(asked, attention=row.program.attention, fusion=row.program.fusion)
    key = asked, sizes, row.sequence_length
    if key not in profiles:
        task = ProfileTask(
            model=row.spec,
            microbatch_sizes=sizes,
            dtype=row.dtype,
            optimizer="adam",
            sequence_length=row.sequence_length,
        )
        try:
            profiles[key] = profile_with_forms(asked, task, find_datasheet(datasheet_of(cluster.device)))
        except PipeplanError as error:
            profiles[key] = error
    profile = profiles[key]
    if isinstance(profile, PipeplanError):
        raise profile
    plan, fits = _planned(row, profile, cluster)
    simulated = plan.simulated or play(plan, instructions=LONGEST)
    assert simulated is not None
    return Prediction(
        row=row,
        seconds=row.batch / simulated.throughput_samples_per_s,
        memory_gib=max(simulated.peak_memory_bytes) / GIB,
        fits=fits,
        plan=plan,
    )


def _planned(row: Row, profile: Profile, cluster: Cluster) -> tuple[Plan, bool]:
    """The answer, and whether it fits."""
    for device in (cluster.device, replace(cluster.device, memory_bytes=ENDLESS_BYTES)):
        problem = PlanningProblem(
            profile=replace(profile, device=device),
            cluster=replace(cluster, device=device),
            batch_size=row.batch,
            options=row.options,
        )
        answer = solve("auto", problem)
        if isinstance(answer, Plan):
            return answer, device == cluster.device
        reasons = "; ".join(f"{each.rule}: {each.detail}" for each in answer.reasons)
    raise InvalidInputError("row", f"must have a plan ({reasons})", row.model)
