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
from planner_service.core.planner.partition import Layout, Places
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

    def fastest(self, *, counts: IntArray | None = None) -> Layout:
        """The search for the fastest that fits, among stages of these replicas (default: any)."""
        return Layout(
            devices=self.devices,
            counts=self._any_count if counts is None else counts,
            cost=self.fitting_s,
            traffic=self.traffic_bytes,
            work=np.diagonal(self.compute_s),
        )

    def smallest(self, *, counts: IntArray | None = None) -> Layout:
        """The search for the smallest, whether it fits or not."""
        return Layout(
            devices=self.devices,
            counts=self._any_count if counts is None else counts,
            cost=self.memory_bytes,
            traffic=self.traffic_bytes,
            work=np.zeros(self.tables.blocks),
        )

    @property
    def _any_count(self) -> IntArray:
        return np.arange(1, self.devices + 1)

    def exchange(self, replicas: IntArray) -> FloatArray:
        """The share of its weights that every replica sends for an update."""
        law = EXCHANGES[self.synchronisation]
        return law(replicas.astype(np.float64))[:, None, None]

    def stage_s(self, places: Places) -> FloatArray:
        """T(i..j, m): what a stage takes a minibatch, compute or synchronisation."""
        replicas = places.replicas
        bandwidth = self.bandwidths.spanning(np.full_like(replicas, places.first), places.first + replicas - 1)
        weight_bytes = self.tables.weight_bytes[places.starts, places.lasts]
        synchronise_s = self.exchange(replicas) * weight_bytes / bandwidth[:, None, None]
        longer_s = np.maximum(self.compute_s[places.starts, places.lasts], synchronise_s)
        return np.asarray(longer_s / replicas[:, None, None])

    def boundary_s(self, places: Places) -> FloatArray:
        """2 C of the boundaries before and after a stage, the larger, on this stage's part of their links.

        A boundary spans the devices of both its stages. Its slowest link lies among one stage's devices and the
        nearest of the other's, or the other way round: each stage looks at its own half, so that both see all of it.
        """
        low, high = np.full_like(places.replicas, places.first), places.first + places.replicas - 1
        into = self.bandwidths.spanning(np.maximum(low - 1, 0), high)
        out = self.bandwidths.spanning(low, np.minimum(high + 1, self.devices - 1))
        before = self._bytes_before[places.starts] / into[:, None]
        after = self._bytes_after[places.lasts] / out[:, None]
        return np.maximum(before[:, :, None], after[:, None, :])

    @cached_property
    def _bytes_before(self) -> FloatArray:
        return np.append(0.0, self.tables.boundary_bytes)

    @cached_property
    def _bytes_after(self) -> FloatArray:
        return np.append(self.tables.boundary_bytes, 0.0)

    def fitting_s(self, places: Places) -> FloatArray:
        """The slower of a stage and its boundaries, infinite where it does not fit its device."""
        cost_s = np.maximum(self.stage_s(places), self.boundary_s(places))
        if self.fits is None:
            return cost_s
        fits = self.fits[:, places.starts, places.lasts][self.in_flight(places)]
        return np.where(fits, cost_s, np.inf)

    def in_flight(self, places: Places) -> IntArray:
        """Minibatches that a worker keeps: ceil(machines from here on / replicas of the stage) (section 3.3)."""
        return np.asarray(-(-(self.devices - places.first) // places.replicas))

    def held_bytes(self, held: int) -> FloatArray:
        """What a worker holds with so many minibatches in flight, and as many weight versions."""
        return self.tables.memory_bytes(_copies(self.problem, held))

    def memory_bytes(self, places: Places) -> FloatArray:
        """What a worker of each stage holds; infinite below the diagonal."""
        held = self.in_flight(places)
        return np.stack([self.held_bytes(int(count))[places.starts, places.lasts] for count in held])

    def traffic_bytes(self, places: Places) -> FloatArray:
        """Bytes sent a minibatch: the boundary before the stage, both ways, and the stage's gradient exchange.

        Each of m workers sends its share once every m minibatches, which comes to one worker's share a minibatch.
        """
        weight_bytes = self.tables.weight_bytes[places.starts, places.lasts]
        before = self._bytes_before[places.starts]
        return np.asarray(self.exchange(places.replicas) * weight_bytes + before[:, None])


def _copies(problem: Problem, held: int) -> Copies:
    if problem.options.memory == "paper":
        return paper_copies("pipedream", recompute=False, depth=held, microbatches=1)
    return training_copies("pipedream", problem.options.optimizer, recompute=False, held=held)
