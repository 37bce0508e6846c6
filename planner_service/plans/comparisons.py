"""Comparisons: what differs between plans, and why one is faster.

A sample takes `compute_s_per_sample` of all workers together, and `slowest_s_per_sample` of the slowest stage, divided
by its replicas. Five factors give the speed:

    samples/s = workers / device_s_per_sample: if every worker always computed
              x balance     mean over slowest: the mean worker's seconds a sample by those of the slowest
              x exchange    compute's share of the slowest stage's compute, exchange and update
              x waiting     the share of the time in which the slowest stage computes, exchanges or updates

The ratio of two plans' speeds is the product of the ratios of these five. Speeds are those of played streams. If either
plan was not played, both are compared by their closed forms. An exchange counts under a schedule with a flush, without
the part that the backward hides. Without a flush later microbatches hide it, and the rest counts as waiting.
"""

from collections.abc import Sequence
from typing import Literal

from pipeplan.costs.memory import rank_bytes, stages_by_rank
from pipeplan.documents.plan import Plan
from pipeplan.formats import clip, percent, several, synchronous
from pipeplan.protocol.plans import Alternatives, Comparison, Difference, Factor, PlanFacts, Speed
from pipeplan.schedules.registry import schedule_named
from planner_service.plans import service as plans
from planner_service.platform.context import Context

_WHAT = {
    "workers": "workers",
    "compute": "compute a sample",
    "balance": "the slowest stage's compute a sample, all its replicas together",
    "exchange": "the slowest stage's exchange and update a sample",
    "waiting": "the slowest stage's waiting",
}
"""The factors of a speed, in words."""

_SAME = (
    *(
        "planner",
        "profile_id",
        "cluster_id",
        "schedule",
        "split_backward",
        "depth",
        "replicas",
        "workers",
        "batch_size",
    ),
    *("microbatch_size", "microbatches", "dtype", "autocast", "precision", "optimizer", "memory_accounting"),
    *("estimated", "bubble_fraction", "stages"),
)
"""The facts that are a plan's attributes."""

_NOT_COMPARED = ("id", "stages", "simulated_samples_per_s", "simulated_bubble_fraction")


def compare(context: Context, plan_ids: list[str]) -> Comparison:
    """The comparison of the plans, in this order. Raises NotFoundError."""
    return comparison([(plan_id, plans.get(context, plan_id)) for plan_id in plan_ids])


def alternatives(context: Context, plan_id: str) -> Alternatives:
    """The plan's alternatives. Raises NotFoundError."""
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
        caveats=_caveats(facts),
        fastest=max(facts, key=lambda one: (one.throughput_samples_per_s or 0.0, one.closed_form_samples_per_s)).id,
    )


def _caveats(compared: Sequence[PlanFacts]) -> tuple[str, ...]:
    """Why the plans are not comparable: a sentence for each fact that should not differ but does."""
    sentences = (
        ("model", "The models differ ({}): a sample is not the same work."),
        ("cluster_id", "The clusters differ: part of the speed is the hardware's, not the plan's."),
        ("profile_id", "The profiles differ: compute was not measured by the same profile."),
        ("dtype", "The numbers differ ({}): a sample is not the same arithmetic."),
        ("autocast", "What is computed in differs ({}): a sample is not the same arithmetic."),
        ("precision", "What linear layers compute in differs ({}): a sample is not the same arithmetic."),
        (
            "batch_size",
            "The batches differ ({}): at equal samples a second the weights are updated more or less often.",
        ),
        ("optimizer", "The optimizers differ ({}): updates and memory are not the same."),
        ("memory_accounting", "Memory is accounted in different ways ({}): its sizes are not comparable."),
        (
            "synchronous",
            "Some train as one process does, others update weights with delay: a sample does not train alike.",
        ),
        ("estimated", "Some costs are estimated, others measured."),
    )
    found = []
    for field, sentence in sentences:
        values = dict.fromkeys(getattr(one, field) for one in compared)
        if len(values) > 1:
            found.append(sentence.format(" and ".join(clip(str(value), 40) for value in values)))
    return tuple(found)


def _speed(plan: PlanFacts, first: PlanFacts) -> Speed:
    """The ratio of the plan's speed to that of the first, and the factors whose product it is."""
    price: Literal["played", "closed form"] = "played"
    rate, first_rate = plan.throughput_samples_per_s, first.throughput_samples_per_s
    if rate is None or first_rate is None:
        price, rate, first_rate = "closed form", plan.closed_form_samples_per_s, first.closed_form_samples_per_s
    if not first_rate or not rate or not plan.slowest_s_per_sample or not first.slowest_s_per_sample:
        return Speed(id=plan.id, ratio=None, price=price, because=())

    (its, texts), (others, against) = _shares(plan, rate), _shares(first, first_rate)
    factors = (
        Factor(name=name, ratio=its[name] / others[name], text=f"{_WHAT[name]}: {texts[name]} against {against[name]}")
        for name in its
    )
    kept = tuple(factor for factor in factors if abs(factor.ratio - 1.0) > 1e-9)
    return Speed(id=plan.id, ratio=rate / first_rate, price=price, because=kept)


def _shares(plan: PlanFacts, samples_per_s: float) -> tuple[dict[str, float], dict[str, str]]:
    """The five factors of a plan's speed by name, and each in words."""
    slowest_s, sample_s = plan.slowest_s_per_sample, 1 / samples_per_s
    # The closed form may expect a longer exchange than a play has time for.
    exchange_s = min(plan.exchange_s_per_sample, max(sample_s - slowest_s, 0.0))
    mean_s = plan.device_s_per_sample / plan.workers
    again = f", recomputing on {several(len(plan.recomputing_stages), 'stage')}" if plan.recomputing_stages else ""
    width = f"{several(plan.replicas[0], 'replica')}" if len(set(plan.replicas)) == 1 else "mixed replicas"
    slowest = f"stage {plan.slowest_stage}, {several(plan.replicas[plan.slowest_stage], 'replica')}"
    batch = f"batches of {plan.batch_size}, {plan.microbatches} x {plan.microbatch_size} a replica"
    shares = {
        "workers": float(plan.workers),
        "compute": 1 / plan.device_s_per_sample,
        "balance": mean_s / slowest_s,
        "exchange": slowest_s / (slowest_s + exchange_s),
        "waiting": (slowest_s + exchange_s) / sample_s,
    }
    words = {
        "workers": f"{plan.workers} ({several(plan.depth, 'stage')}, {width})",
        "compute": f"{_ms(plan.device_s_per_sample)} in microbatches of {plan.microbatch_size}{again}",
        "balance": f"{_ms(slowest_s)} ({slowest}; {slowest_s / mean_s:.3g} times the mean)",
        "exchange": f"{_ms(exchange_s)}",
        "waiting": f"{percent(1 - shares['waiting'])} of the time ({batch})",
    }
    return shares, words


def _ms(value_s: float) -> str:
    """All times of a comparison are in one unit."""
    return f"{1e3 * value_s:.4g} ms"


def paces_s(plan: Plan) -> tuple[float, ...]:
    """Every stage's compute seconds a sample, divided by its replicas, which take samples in turn."""
    split = _splits_backward(plan)
    found = []
    for stage, costs in zip(plan.stages, plan.costs, strict=True):
        backward_s = costs.backward_input_s + costs.backward_weight_s if split else costs.backward_s
        recompute_s = costs.recompute_s if stage.recompute else 0.0
        found.append((costs.forward_s + backward_s + recompute_s) / costs.microbatch_size / stage.replicas)
    return tuple(found)


def _splits_backward(plan: Plan) -> bool:
    return plan.split_backward or schedule_named(plan.schedule).splits_backward


def _facts(plan_id: str, plan: Plan) -> PlanFacts:
    laws, split = schedule_named(plan.schedule), _splits_backward(plan)
    paces, exchange_s = paces_s(plan), []
    for stage, costs in zip(plan.stages, plan.costs, strict=True):
        between_updates = plan.microbatch_size * plan.microbatches * stage.replicas
        waited_s = costs.exchange_tail_s(split=split) if laws.flushes else 0.0
        exchange_s.append((waited_s + costs.update_s) / between_updates)
    compute_s = sum(pace_s * stage.replicas for pace_s, stage in zip(paces, plan.stages, strict=True))
    ranks = stages_by_rank(plan)
    of_ranks_s = [sum(paces[stage] for stage in held) for held in ranks]
    slowest = max(range(len(ranks)), key=of_ranks_s.__getitem__)
    device_s = compute_s * plan.form.devices
    form, played = plan.closed_form, plan.throughput_samples_per_s
    rate = form.throughput_samples_per_s if played is None else played
    return PlanFacts(
        **{name: getattr(plan, name) for name in _SAME},
        id=plan_id,
        model=plan.model.name,
        synchronous=synchronous(plan),
        cuts=tuple(stage.start for stage in plan.stages[1:]),
        recomputing_stages=tuple(index for index, stage in enumerate(plan.stages) if stage.recompute),
        throughput_samples_per_s=played,
        simulated_samples_per_s=played,
        closed_form_samples_per_s=form.throughput_samples_per_s,
        simulated_bubble_fraction=plan.bubble_fraction,
        closed_form_bubble_fraction=form.bubble_fraction,
        slowest_stage=ranks[slowest][0],
        slowest_stage_time_s=plan.stages[ranks[slowest][0]].time_s,
        slowest_s_per_sample=of_ranks_s[slowest],
        exchange_s_per_sample=sum(exchange_s[stage] for stage in ranks[slowest]),
        memory_bytes=max(rank_bytes(plan)),
        compute_s_per_sample=compute_s,
        device_s_per_sample=device_s,
        busy_fraction=rate * device_s / plan.workers,
    )
