"""What holds of all tests."""

import signal

import pytest
from hypothesis import settings

settings.register_profile("pipeplan", deadline=None)  # a busy machine is no failure
settings.load_profile("pipeplan")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background; processes under test inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves all cases but the first of a test that is marked `each_case` to the campaigns."""
    seen: set[tuple[str, str]] = set()
    for item in items:
        if item.get_closest_marker("each_case") and isinstance(item, pytest.Function):
            test = item.parent.nodeid if item.parent else "", item.originalname
            if test in seen:
                item.add_marker(pytest.mark.campaign)
            seen.add(test)
