"""Coordinates: a plan's rank on each axis, and the ranks that share something with it.

Tensor groups are innermost, then context groups (`Form.stride`). One entry of the placement, which places replicas and
ranks of a pipeline, covers all devices of a form. Devices that share experts have numbers in a row among all devices of
a stage, replica by replica.

    rank = entry x form.devices + context x tensor's degree + tensor
"""

from dataclasses import dataclass

from pipeplan.documents.plan import Plan, Worker
from pipeplan.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on every axis. `pipeline` is the first stage that the rank holds.

    `expert` is the share of the experts that it holds.
    """

    pipeline: int
    replica: int
    tensor: int
    context: int
    expert: int


GROUPS = ("tensor", "context", "expert", "replica", "pipeline")
"""The axes along which ranks are grouped, the innermost first."""


def coordinates_of(plan: Plan, rank: int) -> Coordinates:
    """The coordinates of a rank. Raises InvalidInputError for a rank that the plan does not have."""
    require(0 <= rank < plan.workers, "rank", f"must be from 0 to {plan.workers - 1}", rank)
    form = plan.form
    entry, member = divmod(rank, form.devices)
    worker, (context, tensor) = plan.placement[entry], divmod(member, form.tensor)
    return Coordinates(
        pipeline=worker.stage,
        replica=worker.replica,
        tensor=tensor,
        context=context,
        expert=(worker.replica * form.devices + member) // form.stride("expert") % form.expert,
    )


def rank_at(plan: Plan, place: Coordinates) -> int:
    """The rank at these coordinates. Raises InvalidInputError if there is none."""
    form, worker = plan.form, Worker(stage=place.pipeline, replica=place.replica)
    inside = 0 <= place.tensor < form.tensor and 0 <= place.context < form.context
    rule = "must be those of a rank of the plan"
    require(inside and worker in plan.placement, "coordinates", rule, place)
    member = place.context * form.stride("context") + place.tensor * form.stride("tensor")
    rank = plan.placement.index(worker) * form.devices + member
    require(coordinates_of(plan, rank).expert == place.expert, "coordinates", rule, place)
    return rank


def group_of(plan: Plan, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that differ from a rank on one axis only, including itself, in the axis's order.

    An `expert` group shares the experts of a block, whatever its ranks' other coordinates are. A `replica` group holds
    the same weights, without experts.
    """
    require(axis in GROUPS, "axis", f"must be one of {', '.join(GROUPS)}", axis)
    own, form = coordinates_of(plan, rank), plan.form
    if axis == "expert":
        stride, place = form.stride(axis), own.replica * form.devices + rank % form.devices
        start = place - own.expert * stride
        members = [divmod(start + stride * share, form.devices) for share in range(form.expert)]
        entry = {worker.replica: at for at, worker in enumerate(plan.placement) if worker.stage == own.pipeline}
        return tuple(entry[replica] * form.devices + member for replica, member in members)
    if axis in ("tensor", "context"):
        stride, start = form.stride(axis), rank - getattr(own, axis) * form.stride(axis)
        return tuple(start + stride * place for place in range(getattr(form, axis)))
    member = rank % form.devices
    entries = [(worker, entry * form.devices + member) for entry, worker in enumerate(plan.placement)]
    if axis == "pipeline":
        found = [(worker.stage, at) for worker, at in entries if worker.replica == own.replica]
    else:
        found = [(worker.replica, at) for worker, at in entries if worker.stage == own.pipeline]
    return tuple(at for _, at in sorted(found))
