"""Resume: a run goes on from its folder's newest good checkpoint, and is trained as the folder says.

The folder holds the job of its last start (`RunDirectory.job`), with all options of the training. Its report lists them
as well. A resumed run takes them from there. It differs from them only where its starter names the option, and the job
then lists the change.
"""

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipeplan.documents.identity import content_id
from pipeplan.errors import InvalidInputError, require, require_one_of, shown
from pipeplan.protocol.runs import REPORT
from pipeplan.protocol.training import OptionChange, TrainingOptions
from worker_agent.models.spec import parse_spec
from worker_agent.runtime.checkpoint import newest_finite
from worker_agent.runtime.job import RunJob, read_job
from worker_agent.runtime.manifest import Manifest, describe

_log = logging.getLogger(__name__)

CHANGEABLE = (
    "optimizer",
    *(field.name for field in fields(TrainingOptions) if field.name not in ("seed", "checkpoint_every")),
)
"""The options that a resumed run may change: all that change what is trained, except the seed, model, data and plan."""


def resumed(
    job: RunJob,
    *,
    before: int | None = None,
    tell: Callable[[str], None] = _log.warning,
    given: Collection[str] | None = None,
    changed: Collection[str] = (),
) -> RunJob:
    """The job from its folder's newest good checkpoint on; from step 0 if none was ever finished.

    `given` are the options that the starter has given (None: all): each must be as the folder has it, unless it is one
    of `changed`. All others are taken from the folder. `tell` receives which newer checkpoints cannot be used.
    Checkpoints from the step `before` on are ignored. Raises InvalidInputError if all are damaged, if an option
    differs, or if the checkpoint is of another plan, model, data or seed.
    """
    for name in changed:
        require_one_of(CHANGEABLE, "change", name)
    found = newest_finite(job.directory.checkpoints, before=before)
    damaged = [str(defect) for defect in found.defects if not defect.unfinished]
    if found.manifest is None:
        rule = f"must have a whole checkpoint ({'; '.join(damaged)}); without them --resume starts at step 0"
        require(not damaged, "resume", rule, str(job.directory.checkpoints))
    elif found.defects:
        tell(f"{'; '.join(map(str, found.defects))}: going on from step-{found.manifest.step}")

    its, stored = found.manifest, stored_job(job.directory.job, tell)
    if its is not None:
        stored = stored or _reported_job(job, its)
        _require_plan(job, its, any_optimizer=stored is not None)
    if stored is not None:
        job = _as_stored(job, stored, 0 if its is None else its.step, given, changed)
        _require_decay(job, stored.lr_schedule, stored.decay_steps, stored.steps, changed)
    if its is None:
        return job
    if stored is None:
        tell("the folder does not say with which options the run was begun: those that are given now are taken")
        _require_decay(job, job.lr_schedule, None, its.steps, changed)
    for field in ("model", "data", "seed"):
        own, written = getattr(job, field), getattr(its, field)
        require(_same(own, written, field), field, f"must be the one that wrote the checkpoint, {written}", own)
    return replace(job, first_step=its.step)


def stored_job(path: Path, tell: Callable[[str], None]) -> RunJob | None:
    """The job of the last start in a run's folder, with its schedules loaded; None where it cannot be read."""
    if not path.exists():
        return None
    try:
        return read_job(path)
    except (InvalidInputError, ValueError) as error:  # of another version, or cut off
        tell(f"{path} cannot be read: {error}")
        return None


def _reported_job(job: RunJob, its: Manifest) -> RunJob | None:
    """The job with the options that the folder's report lists; None where there is no report, or one without them.

    The report lists the step where a decay ends; it is not fixed where it is the last one that the checkpoint knows.
    """
    try:
        report = json.loads((job.directory.root / REPORT).read_text(encoding="utf-8"))
        options = {name: report["options"][name] for name in ("seed", *CHANGEABLE)}
        changes = [
            OptionChange(step=c["step"], option=c["option"], old=json.dumps(c["old"]), new=json.dumps(c["new"]))
            for c in report["changes"]
        ]
    except (OSError, ValueError, TypeError, KeyError):  # none, cut off, or of an earlier release
        return None
    if options["decay_steps"] == its.steps:
        options["decay_steps"] = None
    plan = replace(job.plan, optimizer=options.pop("optimizer"))
    return replace(job, plan=plan, steps=its.steps, changes=tuple(changes), **options)


def option_values(job: RunJob) -> dict[str, Any]:
    """What each option of the training comes to: defaults are resolved."""
    return {name: _value(job, name) for name in ("seed", *CHANGEABLE)}


def _value(job: RunJob, option: str) -> Any:
    match option:
        case "optimizer":
            return job.plan.optimizer
        case "learning_rate":
            return job.largest_learning_rate
        case "decay_steps":
            return None if job.lr_schedule == "constant" else job.last_decay_step
        case "autocast":
            return job.computes_in
        case "loss_scale":
            return job.first_loss_scale
        case "batch_norm":
            return "minibatch" if job.minibatch_statistics else "microbatch"
        case _:
            return getattr(job, option)


def _with(job: RunJob, other: RunJob, option: str) -> RunJob:
    """The job with an option of another one."""
    if option == "optimizer":
        return replace(job, plan=replace(job.plan, optimizer=other.plan.optimizer))
    return replace(job, **{option: getattr(other, option)})


def _as_stored(
    job: RunJob, stored: RunJob, step: int, given: Collection[str] | None, changed: Collection[str]
) -> RunJob:
    """The job with the stored one's options, except those that are changed. Raises InvalidInputError for others."""
    taken = replace(
        job,
        seed=job.seed if given is None or "seed" in given else stored.seed,
        schedules=job.schedules or stored.schedules,
        changes=stored.changes,
    )
    for option in CHANGEABLE:
        if option in changed:
            continue
        if given is not None and option not in given:
            taken = _with(taken, stored, option)
            continue
        old, now = _value(stored, option), _value(_with(stored, job, option), option)
        name = option.replace("_", "-")
        rule = f"must be {shown(old)}, as the run in this folder has it, or be changed from here on by --change {name}"
        require(_same(old, now, option), option, rule, now)
    if "optimizer" in changed and "learning_rate" not in changed:
        taken = replace(taken, learning_rate=stored.largest_learning_rate)

    pairs = [(option, _value(stored, option), _value(taken, option)) for option in changed]
    new = tuple(
        OptionChange(step=step, option=option, old=json.dumps(old), new=json.dumps(now))
        for option, old, now in pairs
        if not _same(old, now, option)
    )
    return replace(taken, changes=(*stored.changes, *new))


def _require_decay(
    job: RunJob, lr_schedule: str, decay_steps: int | None, steps: int, changed: Collection[str]
) -> None:
    """Raises InvalidInputError where a decay ended with the run's steps, these are others now, and no end is given."""
    fixed = decay_steps is not None or job.decay_steps is not None or job.steps == steps
    decays = "constant" not in (lr_schedule, job.lr_schedule)
    rule = f"must be given: it was {steps}, the steps that the run was to have (another end: --change decay-steps)"
    require(fixed or not decays or "decay_steps" in changed, "decay_steps", rule, None)


def _same(one: Any, other: Any, option: str) -> bool:
    """Whether two values mean the same; SPECs may name the same, with the same options, in other words."""
    if one != other and option in ("model", "data", "loss") and one is not None and other is not None:
        specs = [parse_spec(str(text), field=option) for text in (one, other)]
        return (specs[0].target, specs[0].options) == (specs[1].target, specs[1].options)
    return bool(one == other)


def _require_plan(job: RunJob, its: Manifest, *, any_optimizer: bool) -> None:
    """Raises InvalidInputError unless a checkpoint is of the job's plan. `any_optimizer` accepts another optimizer."""
    plan = replace(job.plan, optimizer=its.plan["optimizer"]) if any_optimizer else job.plan
    if content_id(plan) == its.plan_id:
        return
    rule = "must be the one that wrote the checkpoint"
    for key, own in describe(plan).items():
        require(own == its.plan.get(key), "plan", f"{rule}, whose {key} is {its.plan.get(key)}", own)
    raise InvalidInputError("plan", f"{rule}, {its.plan_id}", content_id(plan))
