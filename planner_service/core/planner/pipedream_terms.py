"""The terms of PipeDream's recurrence (2018, section 3.2), with a stage's devices, links and memory.

T(i..j, m) = 1/m max(sum T_l, sum W_l^m)        one stage on m machines: the larger of compute and synchronisation
W_l^m      = 4 (m - 1)/m |w_l| / bandwidth      through a parameter server; 2 (m - 1)/m by an all-reduce
2 C_i      = 2 a_i / bandwidth                  the boundary after block i, activations and gradients
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner_service.core.cost.all_reduce import EXCHANGES
from planner_service.core.cost.compute import BoolArray, FloatArray, IntArray
from planner_service.core.cost.memory import Copies, paper_copies, training_copies
from planner_service.core.cost.transfer import Bandwidths
from planner_service.core.planner.partition import Layout
from planner_service.core.planner.problem import Problem
from planner_service.core.planner.tables import Tables


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of section 3.2, for all stages that start on a device: (replicas, n, n) over intervals of blocks."""

    problem: Problem
    tables: Tables

    @property
    def devices(self) -> int:
        """The machines, all of which are used."""
        return self.problem.cluster.devices

    @property
    def device_bytes(self) -> int:
        """What a stage may hold."""
        return self.problem.cluster.device.memory_bytes

    @property
    def synchronisation(self) -> str:
        """How replicas exchange gradients: the paper's parameter server unless asked otherwise."""
        return self.problem.options.synchronisation or "parameter-server"

    @cached_property
    def bandwidths(self) -> Bandwidths:
        return Bandwidths(self.problem.cluster)

    @cached_property
    def compute_s(self) -> FloatArray:
        return self.tables.compute_s()

    @cached_property
    def fits(self) -> BoolArray | None:
        """Which intervals fit a device, by the minibatches in flight (from 0); None where all do."""
        masks = [self.tables.fits(_copies(self.problem, held), self.device_bytes) for held in range(self.devices + 1)]
        if masks[-1] is None:
            return None
        everything = np.ones_like(masks[-1])
        return np.stack([everything if mask is None else mask for mask in masks])

    def fastest(self, *, replicas_at_most: int | None = None) -> Layout:
        """The search for the fastest that fits."""
        return Layout(
            blocks=self.tables.blocks,
            devices=self.devices,
            cost=self.fitting_s,
            traffic=self.traffic_bytes,
            replicas_at_most=replicas_at_most,
        )

    def smallest(self, *, replicas_at_most: int | None = None) -> Layout:
        """The search for the smallest, whether it fits or not."""
        return Layout(
            blocks=self.tables.blocks,
            devices=self.devices,
            cost=self.memory_bytes,
            traffic=self.traffic_bytes,
            replicas_at_most=replicas_at_most,
        )

    def exchange(self, replicas: IntArray) -> FloatArray:
        """The share of its weights that every replica sends for an update."""
        law = EXCHANGES[self.synchronisation]
        return law(replicas.astype(np.float64))[:, None, None]

    def stage_s(self, first: int, replicas: IntArray) -> FloatArray:
        """T(i..j, m): what a stage takes a minibatch, compute or synchronisation."""
        bandwidth = self.bandwidths.spanning(np.full_like(replicas, first), first + replicas - 1)
        synchronise_s = self.exchange(replicas) * self.tables.weight_bytes / bandwidth[:, None, None]
        return np.asarray(np.maximum(self.compute_s, synchronise_s) / replicas[:, None, None])

    def boundary_s(self, first: int, replicas: IntArray) -> FloatArray:
        """2 C of the boundaries before and after a stage, the larger, on this stage's part of their links.

        A boundary spans the devices of both its stages. Its slowest link lies among one stage's devices and the
        nearest of the other's, or the other way round: each stage looks at its own half, so that both see all of it.
        """
        before, after = np.zeros((2, len(replicas), self.tables.blocks))
        low, high = np.full_like(replicas, first), first + replicas - 1
        beyond = np.minimum(high + 1, self.devices - 1)
        before[:, 1:] = self.tables.boundary_bytes / self.bandwidths.spanning(np.maximum(low - 1, 0), high)[:, None]
        after[:, :-1] = self.tables.boundary_bytes / self.bandwidths.spanning(low, beyond)[:, None]
        return np.maximum(before[:, :, None], after[:, None, :])

    def fitting_s(self, first: int, replicas: IntArray) -> FloatArray:
        """The slower of a stage and its boundaries, infinite where it does not fit its device."""
        cost_s = np.maximum(self.stage_s(first, replicas), self.boundary_s(first, replicas))
        if self.fits is None:
            return cost_s
        return np.where(self.fits[self.in_flight(first, replicas)], cost_s, np.inf)

    def in_flight(self, first: int, replicas: IntArray) -> IntArray:
        """Minibatches that a worker keeps: ceil(machines from here on / replicas of the stage) (section 3.3)."""
        return np.asarray(-(-(self.devices - first) // replicas))

    def held_bytes(self, held: int) -> FloatArray:
        """What a worker holds with so many minibatches in flight, and as many weight versions."""
        return self.tables.memory_bytes(_copies(self.problem, held))

    def memory_bytes(self, first: int, replicas: IntArray) -> FloatArray:
        """What a worker of each stage holds; infinite below the diagonal."""
        return np.stack([self.held_bytes(int(held)) for held in self.in_flight(first, replicas)])

    def traffic_bytes(self, first: int, replicas: IntArray) -> FloatArray:
        """Bytes sent a minibatch: the boundary before the stage, both ways, and the stage's gradient exchange.

        Each of m workers sends its share once every m minibatches, which comes to one worker's share a minibatch.
        """
        before = np.zeros((self.tables.blocks, 1))
        before[1:, 0] = self.tables.boundary_bytes
        return np.asarray(self.exchange(replicas) * self.tables.weight_bytes + before)


def _copies(problem: Problem, held: int) -> Copies:
    if problem.options.memory == "paper":
        return paper_copies("pipedream", recompute=False, depth=held, microbatches=1)
    return training_copies("pipedream", problem.options.optimizer, recompute=False, held=held)
