"""docs/dashboard.png: `python -m tests.house.dashboard` takes the picture anew, by a Chromium that is installed.

A service of its own holds one plan: GPT-like blocks on four devices.
"""

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from pipeplan.client.client import Client
from pipeplan.documents.cluster import Cluster, Level
from pipeplan.documents.profile import Model
from pipeplan.planners.problem import Options
from pipeplan.protocol.plans import PlanRequest
from planner_service.overview.openapi import DEVICE, PROFILE
from tests.house.pages import DOCS
from tests.planner_service.chromium import OPTIONS, found
from tests.planner_service.servers import serving

SIZE = "1280,1250"
"""The picture's width and height, in points."""


def main() -> None:
    """Takes the picture. Raises LookupError where no Chromium is installed."""
    program = found()
    if program is None:
        raise LookupError("no Chromium is installed: `apt-get install chromium`")
    block = PROFILE.blocks[0]
    profile = replace(
        PROFILE, model=Model(name="gpt2-12"), blocks=tuple(replace(block, name=f"block{i}") for i in range(12))
    )
    cluster = Cluster(device=DEVICE, levels=(Level(size=4, bandwidth_bytes_per_s=1e10, latency_s=5e-6),))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # noqa: SIM117
        with serving(Path(folder) / "service.sqlite3") as (url, _), Client(url) as service:
            stored = service.create_profile(profile), service.create_cluster(cluster)
            request = PlanRequest(
                profile_id=stored[0].id,
                cluster_id=stored[1].id,
                planner="pipedream-2bw",
                batch_size=16,
                options=Options(schedule="1f1b", stages=4),
            )
            plan_id = service.create_plan(request, wait_s=60).plan_id
            options = [option for option in OPTIONS if option != "--remote-debugging-pipe"]
            places = (
                "--hide-scrollbars",
                f"--user-data-dir={folder}/browser",
                f"--screenshot={DOCS / 'dashboard.png'}",
            )
            command = [program, *options, *places, f"--window-size={SIZE}", f"{url}/plans/{plan_id}"]
            subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    main()
