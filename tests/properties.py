"""Properties: how many examples Hypothesis makes of one.

`make test` tries a quarter of what `make test-all` tries, `make quick` (`--hypothesis-profile few`) a few.
"""

from hypothesis import settings

ALL, QUARTER, FEW = "all", "quarter", "few"

# A profile's number is that of properties without one of their own, and the share in percent of the others' numbers.
settings.register_profile(ALL, deadline=None, max_examples=100)  # a busy machine is no failure
settings.register_profile(QUARTER, settings.get_profile(ALL), max_examples=25)
settings.register_profile(FEW, settings.get_profile(ALL), max_examples=4)


def examples(number: int) -> settings:
    """The settings of a property that needs another number of examples than 100. `make test` tries 2 at least."""
    return settings(max_examples=max(min(number, 2), number * settings().max_examples // 100))
