"""Comparisons: what differs between plans, and why one is faster.

All workers of a plan together compute for `compute_s_per_sample` each sample, and are busy with it for a share of their
time:

    samples/s = workers x busy share / compute seconds a sample

The ratio of two plans' speeds is the product of the ratios of these three. Speeds are those of the streams when they
are played. A plan whose streams were not is compared by the closed form, and so is the plan beside it: like with like.
"""

from collections.abc import Sequence
from typing import Literal

from pipeplan.costs.memory import rank_bytes
from pipeplan.documents.plan import Plan
from pipeplan.protocol.plans import Alternatives, Comparison, Difference, Factor, PlanFacts, Speed
from pipeplan.schedules.registry import schedule_named
from planner_service.plans import service as plans
from planner_service.platform.context import Context

_NOT_COMPARED = ("id", "stages", "simulated_samples_per_s", "simulated_bubble_fraction")


def compare(context: Context, plan_ids: list[str]) -> Comparison:
    """The plans side by side, in this order. Raises NotFoundError."""
    return comparison([(plan_id, plans.get(context, plan_id)) for plan_id in plan_ids])


def alternatives(context: Context, plan_id: str) -> Alternatives:
    """What the plan was chosen over. Raises NotFoundError."""
    plan = plans.get(context, plan_id)
    return Alternatives(
        plan_id=plan_id,
        configurations_considered=plan.configurations_considered,
        alternatives=plan.alternatives,
        pareto=plan.pareto,
    )


def comparison(compared: Sequence[tuple[str, Plan]]) -> Comparison:
    """The plans, each with the id under which it is stored, compared with the first of them."""
    facts = [_facts(plan_id, plan) for plan_id, plan in compared]
    differences = []
    for name in PlanFacts.model_fields:
        values = tuple(getattr(one, name) for one in facts)
        if name not in _NOT_COMPARED and any(value != values[0] for value in values):
            differences.append(Difference(field=name, values=values))
    return Comparison(
        plans=tuple(facts),
        differences=tuple(differences),
        speeds=tuple(_speed(one, facts[0]) for one in facts),
        fastest=max(facts, key=lambda one: (one.throughput_samples_per_s or 0.0, one.closed_form_samples_per_s)).id,
    )


def _speed(plan: PlanFacts, first: PlanFacts) -> Speed:
    """How many times as fast as the first the plan is, and which of the three factors make it so."""
    price: Literal["played", "closed form"] = "played"
    rate, first_rate = plan.throughput_samples_per_s, first.throughput_samples_per_s
    if rate is None or first_rate is None:
        price, rate, first_rate = "closed form", plan.closed_form_samples_per_s, first.closed_form_samples_per_s
    busy, first_busy = _busy_fraction(rate, plan), _busy_fraction(first_rate, first)
    if not first_rate or not plan.compute_s_per_sample or not first_busy:
        return Speed(id=plan.id, ratio=None, price=price, because=())

    shares = f"workers compute for {busy:.1%} of the time against {first_busy:.1%}"
    slowest = f"the slowest stage, {plan.slowest_stage}, takes {1e3 * plan.slowest_stage_time_s:.4g} ms a microbatch"
    shares = f"{shares}; {slowest} against {1e3 * first.slowest_stage_time_s:.4g} ms"

    plan_ms, first_ms = 1e3 * plan.compute_s_per_sample, 1e3 * first.compute_s_per_sample
    compute = f"{plan_ms:.4g} ms of compute a sample against {first_ms:.4g}"
    if plan.recomputing_stages != first.recomputing_stages:
        counts = f"{len(plan.recomputing_stages)} stages recompute against {len(first.recomputing_stages)}"
        compute = f"{compute}; {counts}"

    factors = (
        Factor(
            name="workers",
            ratio=plan.workers / first.workers,
            text=f"{plan.workers} workers against {first.workers}",
        ),
        Factor(name="busy", ratio=busy / first_busy, text=shares),
        Factor(name="compute", ratio=first.compute_s_per_sample / plan.compute_s_per_sample, text=compute),
    )
    kept = tuple(factor for factor in factors if abs(factor.ratio - 1.0) > 1e-9)
    return Speed(id=plan.id, ratio=rate / first_rate, price=price, because=kept)


def _busy_fraction(samples_per_s: float, plan: PlanFacts) -> float:
    return samples_per_s * plan.compute_s_per_sample / plan.workers


def _facts(plan_id: str, plan: Plan) -> PlanFacts:
    split = plan.split_backward or schedule_named(plan.schedule).splits_backward
    compute_of_stages_s = []
    for stage, costs in zip(plan.stages, plan.costs, strict=True):
        backward_s = costs.backward_input_s + costs.backward_weight_s if split else costs.backward_s
        recompute_s = costs.recompute_s if stage.recompute else 0.0
        compute_of_stages_s.append((costs.forward_s + backward_s + recompute_s) / costs.microbatch_size)
    compute_s = sum(compute_of_stages_s)
    slowest = max(range(plan.depth), key=lambda index: plan.stages[index].time_s)
    form, played = plan.closed_form, plan.throughput_samples_per_s
    rate = form.throughput_samples_per_s if played is None else played
    return PlanFacts(
        id=plan_id,
        planner=plan.planner,
        model=plan.model.name,
        profile_id=plan.profile_id,
        cluster_id=plan.cluster_id,
        schedule=plan.schedule,
        split_backward=plan.split_backward,
        depth=plan.depth,
        replicas=plan.replicas,
        workers=plan.workers,
        batch_size=plan.batch_size,
        microbatch_size=plan.microbatch_size,
        microbatches=plan.microbatches,
        dtype=plan.dtype,
        optimizer=plan.optimizer,
        memory_accounting=plan.memory_accounting,
        estimated=plan.estimated,
        cuts=tuple(stage.start for stage in plan.stages[1:]),
        recomputing_stages=tuple(index for index, stage in enumerate(plan.stages) if stage.recompute),
        throughput_samples_per_s=played,
        simulated_samples_per_s=played,
        closed_form_samples_per_s=form.throughput_samples_per_s,
        bubble_fraction=plan.bubble_fraction,
        simulated_bubble_fraction=plan.bubble_fraction,
        closed_form_bubble_fraction=form.bubble_fraction,
        slowest_stage=slowest,
        slowest_stage_time_s=plan.stages[slowest].time_s,
        memory_bytes=max(rank_bytes(plan)),
        compute_s_per_sample=compute_s,
        busy_fraction=rate * compute_s / plan.workers,
        stages=plan.stages,
    )
