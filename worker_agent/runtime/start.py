"""Start: a rank's process under torchrun, `python -m worker_agent.runtime.start JOB LAUNCHER`.

The first sign of life comes before the slow imports: a process that hangs in them is found as well.

Slurm and systemd send SIGTERM to all processes of a job. A rank takes it as the request to stop that its launcher takes
it for (`stop`), and ends at once only where the launcher sent it, as torchrun does once another rank has failed.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from worker_agent.engine.processes import exit_with_parent
from worker_agent.runtime.status import StatusWriter, status_path, stop_path

SIGTERM = frozenset({signal.SIGTERM})


def heed_signals(launcher: int, stop: Path) -> None:
    """Receives SIGTERM in a thread of its own, which knows the sender, for the threads that begin after this call.

    Processes that this one forks receive it as usual.
    """

    def receive() -> None:
        while signal.sigwaitinfo(SIGTERM).si_pid != launcher:
            if not stop.exists():
                stop.write_text(str(int(signal.SIGTERM)), encoding="utf-8")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGTERM)
        signal.raise_signal(signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGTERM)
    os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGTERM))
    threading.Thread(target=receive, name="signals", daemon=True).start()


def main() -> None:
    """Gives signs of life, then works."""
    job = Path(sys.argv[1])
    heed_signals(int(sys.argv[2]), stop_path(job.parent))
    try:
        status = StatusWriter(status_path(job.parent, int(os.environ["RANK"])))
    except OSError as error:
        raise SystemExit(f"cannot start: {error}") from None
    exit_with_parent(int(sys.argv[2]))
    from worker_agent.runtime.rank import main as work

    work(job, status)


if __name__ == "__main__":
    main()
