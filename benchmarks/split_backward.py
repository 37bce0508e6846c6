"""The cost of splitting the backward: `python -m benchmarks.split_backward`.

One stage of transformer blocks on one thread; a batch of microbatches forward, then backward: fused, split with p2 in a
loop, split with p2 concatenated. The three take turns, and each round is compared within itself, in processor time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.idle import busy_cores
from worker_agent.engine.devices import place_process
from worker_agent.models.chain import build_model
from worker_agent.runtime.stage import StageBlocks

MODELS = {
    "GPT-2, 4 blocks of 256": "hf:gpt2?n_layer=4&n_embd=256&n_head=8&vocab_size=256&n_positions=128",
    "Llama, 4 blocks of 256": "hf:llama?num_hidden_layers=4&hidden_size=256&num_attention_heads=8"
    "&num_key_value_heads=8&intermediate_size=688&vocab_size=256&max_position_embeddings=128",
}
MICROBATCHES, SAMPLES, TOKENS, WIDTH, ROUNDS = 4, 4, 128, 256, 15
CONTENDERS = {"fused": (False, False), "split, in a loop": (True, False), "split, concatenated": (True, True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one round over all microbatches."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def backward_s(self) -> float:
        """All of the backward."""
        return self.input_s + self.weight_s

    @property
    def all_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def contender(spec: str, *, split: bool, concatenate: bool) -> Callable[[], Times]:
    """A stage of the model's inner blocks, and one round on it."""
    blocks = build_model(spec, seed=0).blocks[1:-1]
    device = torch.device("cpu")
    stage = StageBlocks(
        blocks,
        first_block=1,
        criterion=None,
        recompute=False,
        seed=0,
        device=device,
        split_backward=split,
        concatenate=concatenate,
    )
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator) for _ in range(MICROBATCHES)]
    gradients = [torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator) for _ in range(MICROBATCHES)]

    def run() -> Times:
        _clear(blocks)
        marks_s = [time.process_time()]
        for k, x in enumerate(inputs):
            stage.forward(k, (x.requires_grad_(),))
        marks_s.append(time.process_time())
        for k, gradient in enumerate(gradients):
            stage.backward(k, (gradient,))
        marks_s.append(time.process_time())
        if split:
            stage.backward_weight(range(MICROBATCHES))
        marks_s.append(time.process_time())
        for x in inputs:
            x.grad = None
        forward_s, input_s, weight_s = (end - start for start, end in pairwise(marks_s))
        return Times(forward_s=forward_s, input_s=input_s, weight_s=weight_s)

    return run


def _clear(blocks: Sequence[nn.Module]) -> None:
    gradients: list[Tensor] = [p.grad for p in chain(*(b.parameters() for b in blocks)) if p.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


def main() -> None:
    """Prints a table a model: medians over the rounds, and ratios to the fused backward, round by round."""
    print(f"{ROUNDS} rounds of {MICROBATCHES} microbatches, in turn; {busy_cores():.2f} cores were busy before")
    place_process("cpu", 0, 1)
    for name, spec in MODELS.items():
        runs = {n: contender(spec, split=s, concatenate=c) for n, (s, c) in CONTENDERS.items()}
        found: dict[str, list[Times]] = {n: [] for n in runs}
        for number in range(ROUNDS + 2):
            for n, run in runs.items():
                times = run()
                if number >= 2:
                    found[n].append(times)
        _show(name, found)


def _show(name: str, found: dict[str, list[Times]]) -> None:
    print(f"\n| {name} | p1 ms | p2 ms | backward, of fused | forward and backward, of fused |\n|---|---|---|---|---|")
    for n, rounds in found.items():
        pairs = list(zip(rounds, found["fused"], strict=True))
        backward = median(own.backward_s / peer.backward_s for own, peer in pairs)
        whole = median(own.all_s / peer.all_s for own, peer in pairs)
        p1_ms, p2_ms = (1e3 * median(getattr(t, field) for t in rounds) for field in ("input_s", "weight_s"))
        print(f"| {n} | {p1_ms:.1f} | {p2_ms:.1f} | {backward:.3f} | {whole:.3f} |")


if __name__ == "__main__":
    main()
