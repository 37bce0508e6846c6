"""The mathematics of every schedule in one process: which weights a batch's gradient is taken at, and the update."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from planner_service.core.plan import Plan
from worker_agent.models.chain import build_model
from worker_agent.models.data import open_data
from worker_agent.models.losses import build_loss

Weights = dict[str, Tensor]

OPTIMIZERS: dict[str, Callable[[list[Tensor], float], torch.optim.Optimizer]] = {
    "sgd": lambda weights, rate: torch.optim.SGD(weights, lr=rate),
    "momentum": lambda weights, rate: torch.optim.SGD(weights, lr=rate, momentum=0.9),
    "adam": lambda weights, rate: torch.optim.Adam(weights, lr=rate),
    "adamw": lambda weights, rate: torch.optim.AdamW(weights, lr=rate),
}


def delays(plan: Plan) -> tuple[int, ...]:
    """Updates that each stage's gradient is behind: 0 with a flush, 1 for 2BW, n - s for PipeDream."""
    if plan.schedule == "pipedream-2bw":
        return (1,) * plan.depth
    if plan.schedule == "pipedream":
        return tuple(plan.depth - 1 - stage for stage in range(plan.depth))
    return (0,) * plan.depth


def train(
    plan: Plan, model: str, data: str, *, steps: int, seed: int, learning_rate: float, delayed: Sequence[int] = ()
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
    newest = {name: p.detach().clone().requires_grad_() for name, p in chain.root.named_parameters()}
    history = [{name: p.detach().clone() for name, p in newest.items()}]
    optimizer = OPTIMIZERS[plan.optimizer](list(newest.values()), learning_rate)
    batch = plan.batch_size // plan.microbatch_size
    for step in range(steps):
        used = {name: history[max(step - behind[stage_of[name]], 0)][name].clone().requires_grad_() for name in newest}
        for k in range(step * batch, (step + 1) * batch):
            inputs, targets = (t.to(getattr(torch, plan.dtype)) for t in source.microbatch(k))  # type: ignore[union-attr]
            outputs = functional_call(chain.root, used, (inputs,))
            torch.autograd.backward(build_loss(None)(outputs, targets) / batch)
        for name, parameter in newest.items():
            parameter.grad = used[name].grad
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in newest.items()})
    return history[-1]
