"""Start: a rank's process under torchrun, `python -m worker_agent.runtime.start JOB LAUNCHER`.

The first sign of life comes before the slow imports: a process that hangs in them is found as well.
"""

import os
import sys
from pathlib import Path

from worker_agent.engine.processes import exit_with_parent
from worker_agent.runtime.status import StatusWriter, status_path


def main() -> None:
    """Gives signs of life, then works."""
    job = Path(sys.argv[1])
    try:
        status = StatusWriter(status_path(job.parent, int(os.environ["RANK"])))
    except OSError as error:
        raise SystemExit(f"cannot start: {error}") from None
    exit_with_parent(int(sys.argv[2]))
    from worker_agent.runtime.rank import main as work

    work(job, status)


if __name__ == "__main__":
    main()
