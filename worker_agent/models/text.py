"""Text: token sequences for language models. B sequences of S tokens; inputs (B, S), targets the tokens that follow."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pipeplan.errors import require, require_count
from worker_agent.models.samples import Samples

CORPUS_BYTES = 4 * 2**20
"""How much of the standard library is read."""


def standard_library(*, microbatch_size: int, seed: int, sequence_length: int = 128) -> Samples:
    """Next-byte prediction on the sources of Python's own standard library: vocabulary 256, nothing to download.

    A sample is a window of the text. Windows do not overlap; the seed gives their order.
    """
    require_count("data.sequence_length", sequence_length)
    corpus = _corpus()
    windows = (len(corpus) - 1) // sequence_length
    require(windows > 0, "data.sequence_length", f"must be below the corpus's {len(corpus)} bytes", sequence_length)
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(seed))
    offsets = torch.arange(sequence_length + 1)

    def read(samples: Tensor) -> tuple[Tensor, Tensor]:
        starts = order[samples] * sequence_length
        return _shifted(corpus[starts[:, None] + offsets].long())

    return Samples(read, count=windows, microbatch_size=microbatch_size)


def random_tokens(
    *, microbatch_size: int, seed: int, vocab_size: int = 256, sequence_length: int = 128, samples: int = 256
) -> Samples:
    """Uniformly drawn tokens: nothing to learn, but the same work as with real ones."""
    require_count("data.vocab_size", vocab_size)
    require_count("data.sequence_length", sequence_length)
    require_count("data.samples", samples)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (samples, sequence_length + 1), generator=generator)
    return Samples(lambda numbers: _shifted(tokens[numbers]), count=samples, microbatch_size=microbatch_size)


def _shifted(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, S + 1) -> the first S tokens and the last S: (B, S) each."""
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@cache
def _corpus() -> Tensor:
    """The bytes of the standard library's modules in the order of their names, as (bytes,) uint8."""
    content = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(content) < CORPUS_BYTES:
            content += path.read_bytes()
    return torch.frombuffer(content[:CORPUS_BYTES], dtype=torch.uint8)
