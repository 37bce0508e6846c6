"""Budget: the limits of the search. Plays are limited by their instructions: 100,000 take a third of a second."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBudget:
    """Upper bounds, each with its reason."""

    played_instructions: int = 600_000  # of plans played for their bounds: two seconds
    longest_play: int = 90_000  # of one plan: deep pipelines of many microbatches may be fastest
    first_plays: int = 12  # plans of different degrees, played before bounds decide: on slow networks bounds are loose
    among: int = 1000  # likely fast configurations from which these plans are taken
    near: float = 0.95  # no more of them are played once a play reaches this share of the highest bound
    step_instructions: int = 150_000  # of plans that are a step from the fastest
    step_splits: int = 4  # splits of the fastest plan's configuration that are a step, and moves of its cuts
    climb_instructions: int = 200_000  # of plans with moved cuts: three plays of deep pipelines
    host_instructions: int = 100_000  # of plans that offload without a request, besides steps
    offloading: int = 40  # configurations searched if all of them offload without a request: half a second
    choice_instructions: int = 100_000  # of plans with other degrees; those beyond it have only their closed form
    choice_values: int = 4  # other values of a degree that are tried, the likely fast ones first
    choice_tries: int = 100  # configurations with a value that are tried until one fits
    misses: int = 50  # configurations of the lowest average memory for which stages are made, if nothing fits
    squeezing_moves: int = 12  # blocks that are moved to make ranks with several stages fit


BUDGET = WholeBudget()
