"""Randomness: the global random numbers of torch, NumPy and Python, as functions of their purpose."""

import random
from hashlib import blake2b

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """A 63-bit seed: the same under every Python and in every process."""
    digest = blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_seed(seed: int, microbatch: int, block: int) -> int:
    """The seed for one block's work on one microbatch. A stage computes each of the two parts once."""
    return seed_of(seed, microbatch) ^ seed_of(block)


def seed_others(seed: int) -> None:
    """Sets NumPy's and Python's random states."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def others_have_drawn(seed: int) -> bool:
    """Whether random numbers of NumPy or Python were drawn since `seed_others`."""
    kind, numbers, *place = np.random.RandomState(seed % 2**32).get_state()
    now_kind, now_numbers, *now_place = np.random.get_state()
    same = (kind, place) == (now_kind, now_place) and np.array_equal(numbers, now_numbers)
    return not same or random.getstate() != random.Random(seed).getstate()


def seed_all(seed: int) -> None:
    """Sets all three."""
    seed_others(seed)
    torch.default_generator.manual_seed(seed)
