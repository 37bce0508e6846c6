"""Budget: every limit on the effort of PipeDream's searches. Effort is counted, not timed, so answers do not vary."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionBudget:
    """Upper bounds, unless stated otherwise."""

    chain_blocks: int = 12_000
    """The blocks of a model: a few seconds of search, whose time grows with their square."""

    listed_cuts: int = 5000
    """A graph's cuts that are all listed; if there are more, some are chosen (`refine`)."""

    workspace_entries: int = 50_000_000
    """Entries of the table of workspaces, times the different sizes of workspaces: about a second."""

    released_entries: float = 2e10
    """The entries that the released program's tables compare: about a minute."""

    recurrence_entries: float = 1e8
    """The entries that the recurrence with memory compares: a few seconds. Beyond, a gap may remain."""

    tied_entries: float = 3e7
    """The entries that the rule for ties compares: some tenths of a second."""

    reserved_growth: float = 1.5
    """The least ratio of the memory reserved for messages to that of the search before: few searches, little waste."""

    nearest_precision: float = 0.05
    """The relative precision of the bytes of the nearest miss, if messages count: about five searches."""

    refined_rounds: int = 4
    """The rounds in which cuts are added to a graph's: each solves all of its states again."""

    refined_cuts: int = 1200
    """The cuts that are solved at once after the first round."""

    refined_entries: float = 2e7
    """(Cuts x devices) squared: if memory decides, a search compares this many entries in about a second."""

    refined_blocks: int = 4000
    """The blocks of a dependency table; beyond, no cuts are added."""

    refined_steps: int = 100_000
    """The blocks examined for the cuts near one cut of a plan: a few hundredths of a second."""

    slowest_stages: int = 4
    """The slow stages that give blocks to any other stage, and those that get a device from any other (`near`)."""

    split_cuts: int = 2
    """The places where a stage is split between the same devices (`near`)."""

    few_devices: int = 16
    """A small number of devices, for `auto`: partitions on fewer devices are played up to this number."""


BUDGET = PartitionBudget()
