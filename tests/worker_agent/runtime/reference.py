"""The mathematics of every schedule in one process: which weights a batch's gradient is taken at, and the update."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pipeplan.documents.plan import Plan
from worker_agent.models.chain import build_model
from worker_agent.models.data import moved, open_data
from worker_agent.models.losses import build_loss
from worker_agent.models.values import as_values

Weights = dict[str, Tensor]

CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""torch's own, by the names in plans."""


def delays(plan: Plan) -> tuple[int, ...]:
    """Updates that each stage's gradient is behind: 0 with a flush, 1 for 2BW, n - s for PipeDream.

    With vertical sync all of PipeDream's are as far behind as those of the input stage.
    """
    if plan.schedule == "pipedream-2bw":
        return (1,) * plan.depth
    if plan.schedule == "pipedream":
        return tuple(plan.depth - 1 - stage for stage in range(plan.depth))
    if plan.schedule == "pipedream-vertical-sync":
        return (plan.depth - 1,) * plan.depth
    return (0,) * plan.depth


class Row(nn.Sequential):
    """Blocks one after the other, which may hand on several tensors."""

    def forward(self, *values: Tensor) -> Tensor:
        for block in self:
            made = block(*values)
            values = made if isinstance(made, tuple) else (made,)
        return values[0]


def train(
    plan: Plan,
    model: str,
    data: str,
    *,
    steps: int,
    seed: int,
    learning_rate: float,
    delayed: Sequence[int] = (),
    clip_norm: float | None = None,
    rate_of: Callable[[int], float] | None = None,
    autocast: torch.dtype | None = None,
    loss_scale: float | None = None,
) -> Weights:
    """W(t+1) = update(W(t), grad f on batch t at, stage by stage, W(max(t - delay, 0))); the last W by name."""
    chain = build_model(model, seed=seed, dtype=getattr(torch, plan.dtype))
    source = open_data(data, microbatch_size=plan.microbatch_size, seed=seed)
    behind = delayed or delays(plan)
    stage_of = {
        name: s
        for s, stage in enumerate(plan.stages)
        for i in range(stage.start, stage.stop)
        for name in chain.root.state_dict()
        if name.startswith(f"{i}.")
    }
    dtype = getattr(torch, plan.dtype)
    kept = torch.float32 if plan.master_weights else dtype
    trained = {name: p.requires_grad for name, p in chain.root.named_parameters()}
    newest = {name: p.detach().to(kept, copy=True).requires_grad_() for name, p in chain.root.named_parameters()}
    history = [{name: p.detach().to(dtype, copy=True) for name, p in newest.items()}]
    weights = list(newest.values())
    # where bits are compared, the fused form: only that is the same to the last one
    optimizer = CLASSES[plan.optimizer](weights, lr=learning_rate, fused=plan.master_weights)
    batch = plan.batch_size // plan.microbatch_size
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, enabled=loss_scale is not None)
    for step in range(steps):
        versions = {name: history[max(step - behind[stage_of[name]], 0)][name] for name in newest}
        used = {name: version.clone().requires_grad_(trained[name]) for name, version in versions.items()}
        sums: dict[str, Tensor] = {}
        for k in range(step * batch, (step + 1) * batch):
            inputs, targets = (moved(value, torch.device("cpu"), dtype) for value in source.microbatch(k))
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                outputs = functional_call(Row(*chain.blocks), used, as_values(inputs))
                loss = build_loss(None)(outputs, targets)
            torch.autograd.backward(scaler.scale(loss / batch))
            for name, version in used.items():
                if version.grad is not None:
                    sums[name] = version.grad.to(kept) + sums.get(name, 0.0)
                    version.grad = None
        for name, parameter in newest.items():
            parameter.grad = sums.get(name)
        scaler.unscale_(optimizer)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights, clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step) if rate_of else learning_rate
        scaler.step(optimizer)
        scaler.update()
        history.append({name: p.detach().to(dtype, copy=True) for name, p in newest.items()})
    return history[-1]


def train_on_replicas(
    plan: Plan, model: str, data: str, *, minibatches: int, seed: int, learning_rate: float
) -> Weights:
    """PipeDream with unequal replicas and plain SGD, minibatch by minibatch (2018, sections 3.3 and 3.4).

    A stage of r replicas makes version u + 1 = W(u) - lr * mean gradient of its u-th r minibatches. Minibatch k (from
    0) runs there on the newest version but (in flight - 1); ceil(workers from the stage on / r) are in flight. With
    vertical sync it runs on the newest version that holds only minibatches of the input stage's version.
    """
    chain = build_model(model, seed=seed, dtype=getattr(torch, plan.dtype))
    source = open_data(data, microbatch_size=plan.microbatch_size, seed=seed)
    start = {name: p.detach().clone() for name, p in chain.root.named_parameters()}
    stages = [
        {name for name in start if any(name.startswith(f"{i}.") for i in range(stage.start, stage.stop))}
        for stage in plan.stages
    ]
    history = [[{name: start[name] for name in names}] for names in stages]
    rounds: list[list[Weights]] = [[] for _ in stages]
    for k in range(minibatches):
        used: Weights = {}
        first = plan.replicas[0]
        seen = first * max(k // first - (-(-sum(plan.replicas) // first) - 1), 0)
        for s, replicas in enumerate(plan.replicas):
            in_flight = -(-sum(plan.replicas[s:]) // replicas)
            newest = max(k // replicas - (in_flight - 1), 0)
            synchronised = max(v for v in range(newest + 1) if v * replicas <= seen)
            version = history[s][synchronised if plan.schedule == "pipedream-vertical-sync" else newest]
            used |= {name: p.clone().requires_grad_() for name, p in version.items()}
        inputs, targets = (t.to(getattr(torch, plan.dtype)) for t in source.microbatch(k))  # type: ignore[union-attr]
        torch.autograd.backward(build_loss(None)(functional_call(chain.root, used, (inputs,)), targets))
        for s, names in enumerate(stages):
            rounds[s].append({name: used[name].grad for name in names})  # type: ignore[misc]
            if len(rounds[s]) == plan.replicas[s]:
                mean = {name: sum(g[name] for g in rounds[s]) / plan.replicas[s] for name in names}
                history[s].append({name: p - learning_rate * mean[name] for name, p in history[s][-1].items()})
                rounds[s] = []
    return {name: p for versions in history for name, p in versions[-1].items()}


def train_in_turn(
    plan: Plan, model: str, data: str, *, steps: int, seed: int, learning_rate: float, behind: int | None = None
) -> Weights:
    """ASP: replica after replica updates alone, with the mean over its own microbatches of a batch.

    Update k (from 1) is made of the gradient at w(max(k - replicas, 0)), or at w(max(k - 1 - behind, 0)).
    """
    chain = build_model(model, seed=seed, dtype=getattr(torch, plan.dtype))
    source = open_data(data, microbatch_size=plan.microbatch_size, seed=seed)
    replicas = plan.replicas[0]
    delay = replicas - 1 if behind is None else behind
    newest = {name: p.detach().clone().requires_grad_() for name, p in chain.root.named_parameters()}
    history = [{name: p.detach().clone() for name, p in newest.items()}]
    optimizer = CLASSES[plan.optimizer](list(newest.values()), lr=learning_rate)
    for update in range(steps * replicas):
        batch, replica = divmod(update, replicas)
        used = {name: p.clone().requires_grad_() for name, p in history[max(update - delay, 0)].items()}
        for microbatch in range(plan.microbatches):
            k = (batch * plan.microbatches + microbatch) * replicas + replica
            inputs, targets = (t.to(getattr(torch, plan.dtype)) for t in source.microbatch(k))  # type: ignore[union-attr]
            loss = build_loss(None)(functional_call(chain.root, used, (inputs,)), targets)
            torch.autograd.backward(loss / plan.microbatches)
        for name, parameter in newest.items():
            parameter.grad = used[name].grad
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in newest.items()})
    return history[-1]
