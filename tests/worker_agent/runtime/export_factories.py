"""Factories whose blocks keep buffers and share a parameter, or have their weights in memory that is not torch's."""

import numpy as np
import torch
from torch import nn


def with_buffers() -> list[nn.Module]:
    first, last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    last.weight = first.weight
    return [first, nn.BatchNorm1d(8), last]


def of_arrays() -> list[nn.Module]:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for number, layer in enumerate(layers):
        weight = np.random.default_rng(number).normal(size=(8, 8)) / 8**0.5
        layer.weight = nn.Parameter(torch.from_numpy(weight))
    return [*layers]
