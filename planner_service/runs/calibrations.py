"""Calibrations: the corrections from measured runs of one profile and one cluster, and the plan that they lead to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.calibration.calibrate import calibrate
from pipeplan.calibration.samples import MeasuredRun
from pipeplan.documents.calibration import Calibration
from pipeplan.documents.cluster import Cluster
from pipeplan.documents.files import parse
from pipeplan.documents.profile import Profile
from pipeplan.errors import InvalidInputError, require
from pipeplan.formats import TermRow, calibration_terms
from pipeplan.programs.instructions import Update
from pipeplan.protocol.plans import PlanRequest
from pipeplan.protocol.runs import Run, RunQuery, RunSummary
from planner_service.documents.service import profiles
from planner_service.plans import service as plans
from planner_service.platform.context import Context
from planner_service.runs import service as runs

MOST_RUNS = 10
OFFERED = 20
"""How many of the model's newest runs are searched for others that can be added."""

INSTRUCTION_CHARACTERS = 60
"""The characters that an instruction of a timeline counts for in the choice of the reading process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The documents to correct, as texts, and the measured runs."""

    profile: str
    cluster: str
    runs: tuple[MeasuredRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A calibration, and its terms with those of the profile and the cluster."""

    calibration: Calibration
    terms: tuple[TermRow, ...]


def fitted(context: Context, run_ids: Sequence[str]) -> Fitted:
    """The corrections from the runs. Raises NotFoundError, and InvalidInputError if the runs do not match."""
    require(1 <= len(run_ids) <= MOST_RUNS, "id", f"must name 1 to {MOST_RUNS} runs", len(run_ids))
    first = runs.get(context, run_ids[0])
    of = plans.get(context, first.plan_id)
    measured = [_measured(context, run_id) for run_id in run_ids]
    for run_id, run in zip(run_ids, measured, strict=True):
        for field in ("profile_id", "cluster_id"):
            wanted, given = getattr(of, field), getattr(run.plan, field)
            require(given == wanted, f"{run_id}.plan.{field}", f"must be that of run {run_ids[0]}, {wanted}", given)
    profile = profiles.document(context, of.profile_id)
    fit = Fit(profile=profile, cluster=plans.cluster_text(context, of.cluster_id), runs=tuple(measured))
    instructions = sum(len(lane.instructions) for run in measured for lane in run.timeline.lanes)
    size = len(fit.profile) + len(fit.cluster) + INSTRUCTION_CHARACTERS * instructions
    return context.parsing.read_stored(_fitted, fit, size)


def _fitted(fit: Fit) -> Fitted:
    """Fits. The parser's process imports this by its name."""
    profile, cluster = parse(Profile, fit.profile), parse(Cluster, fit.cluster)
    found = calibrate(profile, cluster, fit.runs)
    return Fitted(calibration=found, terms=tuple(calibration_terms(found, profile, cluster)))


def _measured(context: Context, run_id: str) -> MeasuredRun:
    """The run as a calibration reads it; only the end of a very long one."""
    run = runs.get(context, run_id)
    if run.report is None:
        raise InvalidInputError("id", "must be a run that has succeeded", f"{run_id}, which is {run.state}")
    plan = plans.get(context, run.plan_id)
    timeline = runs.timelines(context, run_id)["measured"]
    updates = (sum(isinstance(each, Update) for each in lane.instructions) // plan.chunks for lane in timeline.lanes)
    whole = min(timeline.batches, *updates)
    require(whole > 0, "id", "must be a run that holds a whole batch", run_id)
    ranks = sorted(run.report.ranks, key=lambda rank: rank.rank)
    of_devices = tuple(rank.device_memory for rank in ranks if rank.device_memory is not None)
    return MeasuredRun(
        plan=plan,
        timeline=replace(timeline, batches=whole),
        peak_resident_bytes=tuple(rank.peak_resident_bytes for rank in ranks),
        device_memory=of_devices if len(of_devices) == len(ranks) else (),
    )


def others(context: Context, run: Run) -> tuple[RunSummary, ...]:
    """Other runs that succeeded with plans of the same profile and cluster, the newest of them."""
    of = plans.summary(context, run.plan_id)
    newest = runs.page(context, RunQuery(model=of.model, state="succeeded", limit=OFFERED)).items
    found = []
    for each in newest:
        plan = plans.summary(context, each.plan_id)
        if each.id != run.id and (plan.profile_id, plan.cluster_id) == (of.profile_id, of.cluster_id):
            found.append(each)
    return tuple(found)


def request(context: Context, run_ids: Sequence[str]) -> PlanRequest:
    """The request of the first run's plan, corrected by all of the runs."""
    found = fitted(context, run_ids)
    asked = plans.request(context, runs.get(context, run_ids[0]).plan_id)
    return asked.model_copy(update={"calibration": found.calibration})
