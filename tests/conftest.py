"""What holds of all tests."""

import signal

import pytest
from hypothesis import is_hypothesis_test, settings

from tests.properties import ALL, QUARTER

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; processes under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Has Hypothesis try a quarter of the examples where the campaigns are left out, unless another profile is named;
    the tests are imported later.
    """
    own = QUARTER if config.option.markexpr == "not campaign" else ALL
    settings.load_profile(config.getoption("--hypothesis-profile") or own)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves all cases but the first of a test that is marked `each_case` to the campaigns. Properties are in both."""
    seen: set[tuple[str, str]] = set()
    for item in items:
        if config.option.markexpr == "campaign" and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.campaign)
        if item.get_closest_marker("each_case") and isinstance(item, pytest.Function):
            test = item.parent.nodeid if item.parent else "", item.originalname
            if test in seen:
                item.add_marker(pytest.mark.campaign)
            seen.add(test)
