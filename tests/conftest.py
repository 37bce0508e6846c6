"""What holds of all tests."""

import os

import pytest
from hypothesis import settings

settings.register_profile("pipeplan", deadline=None)  # a busy machine is no failure
settings.load_profile("pipeplan")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Half as many workers again as there are cores, four at most: much of the tests' time is waiting for processes."""
    return min((os.cpu_count() or 1) * 3 // 2, 4) or 1
