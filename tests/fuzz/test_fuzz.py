"""A few hundred generated requests against the API's description; `make fuzz` sends ten thousand."""

from pathlib import Path

import pytest

from tests.fuzz.run import fuzz, new_database


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_no_generated_request_breaks_the_api_or_its_description(kind: str, tmp_path: Path) -> None:
    with new_database(kind, tmp_path) as database:
        run = fuzz(database, tmp_path, 1, 1, "examples,fuzzing", quiet=True)
    assert run.returncode == 0, run.stdout
