"""Built-in data: deterministic by seed, next-token targets, within the vocabulary."""

import torch

from worker_agent.models.presets import random_features, regression
from worker_agent.models.text import random_tokens, standard_library


def test_the_targets_are_the_tokens_one_further() -> None:
    inputs, targets = standard_library(microbatch_size=3, seed=0, sequence_length=32)[1]
    assert inputs.shape == targets.shape == (3, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.min()) >= 0 and int(inputs.max()) < 256


def test_the_standard_librarys_windows_cover_the_text_once_in_the_seeds_order() -> None:
    first, again, other = (standard_library(microbatch_size=64, seed=s, sequence_length=2**16) for s in (1, 1, 2))
    assert torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], other[0][0])
    everything = standard_library(microbatch_size=1, seed=1, sequence_length=2**16)
    windows = {everything[i][0].numpy().tobytes() for i in range(len(everything))}
    assert len(windows) == len(everything)


def test_random_tokens_stay_within_the_vocabulary() -> None:
    inputs, targets = random_tokens(microbatch_size=50, seed=0, vocab_size=3, sequence_length=9)[0]
    assert inputs.shape == targets.shape == (50, 9)
    assert set(inputs.flatten().tolist()) == {0, 1, 2}


def test_regression_and_random_features_come_from_their_seed() -> None:
    for make in (regression, random_features):
        first, again, other = (make(microbatch_size=4, seed=s, width=5)[2] for s in (1, 1, 2))
        assert first[0].shape == (4, 5)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert not torch.equal(first[0], other[0])
