"""Rules: for how long, and how many of each kind of row the database keeps, in the notation of settings and commands.

A rule is `runs=90d` (an age) or `runs=1000` (a number). A noun may have several rules: a row is removed once any of
them covers it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeplan.errors import require
from pipeplan.protocol.tokens import DAY_S

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S, "w": 7 * DAY_S, "y": 365 * DAY_S}
"""The units of a time, as in 90d."""

KEPT = ("runs", "abandoned-runs", "jobs", "plans", "profiles", "clusters", "agents", "events", "tokens", "audit")
"""The nouns of rules, in the order of removal: a plan after its runs, a profile after its plans.

`runs` are those that have succeeded; `abandoned-runs` failed, died or were cancelled, and could still be resumed.
"""

UNASKED = ("abandoned-runs", "audit")
"""The nouns that are removed only if a rule names them."""

MAX_AGE_S = 1000 * UNITS_S["y"]
LARGEST_NUMBER = 10**12

_AGE = re.compile(r"([1-9][0-9]{0,8})([smhdwy])")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,11}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rows to remove: those older than an age, and those beyond a number of the newest. None: no such bound."""

    older_than_s: float | None = None
    most: int | None = None

    def __str__(self) -> str:
        bounds = {"older than": self.older_than_s, "beyond": self.most}
        return " or ".join(f"{name} {bound:g}" for name, bound in bounds.items() if bound is not None)

    def __post_init__(self) -> None:
        age_s = self.older_than_s
        require(
            age_s is None or 0 < age_s <= MAX_AGE_S, "older_than", "must be above 0 s and at most 1000 years", age_s
        )
        require(self.most is None or 0 <= self.most <= LARGEST_NUMBER, "keep", "must be 0 or more", self.most)


def age_s(text: str) -> int | None:
    """The seconds of an age such as 90d; None for any other text."""
    match = _AGE.fullmatch(text)
    return None if match is None else int(match[1]) * UNITS_S[match[2]]


def parse_rules(texts: Iterable[str]) -> Mapping[str, Rule]:
    """The rules by noun. Raises InvalidInputError."""
    rules: dict[str, Rule] = {}
    for text in texts:
        noun, _, bound = (part.strip() for part in text.partition("="))
        require(noun in KEPT, "", f"must be rules such as runs=90d or runs=1000 on {', '.join(KEPT)}", text)
        older_than_s = age_s(bound)
        known = rules.get(noun, Rule())
        if older_than_s is not None:
            require(known.older_than_s is None, "", f"must give one age for {noun}", text)
            rules[noun] = replace(known, older_than_s=older_than_s)
        else:
            rule = "must give an age such as 90d (s, m, h, d, w or y), or a number of rows"
            require(_NUMBER.fullmatch(bound) is not None, "", rule, text)
            require(known.most is None, "", f"must give one number for {noun}", text)
            rules[noun] = replace(known, most=int(bound))
    return rules
