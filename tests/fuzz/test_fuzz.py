"""A few hundred generated requests against the API's description; `make fuzz` sends ten thousand."""

from pathlib import Path

import pytest

from tests.fuzz.run import fuzz


@pytest.mark.campaign
def test_no_generated_request_breaks_the_api_or_its_description(tmp_path: Path) -> None:
    run = fuzz(tmp_path, 1, 1, "examples,fuzzing", quiet=True)
    assert run.returncode == 0, run.stdout
