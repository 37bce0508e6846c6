"""Heart: renews a lease from a thread of its own, so that a service that does not answer never holds up its agent."""

import threading
import time
from collections.abc import Callable

from pipeplan.errors import LeaseLostError, PipeplanError
from pipeplan.protocol.jobs import Lease, Progress
from worker_agent.client import AgentClient, is_cut_off

_TELL_S = 0.3
_LEAST_S = 0.1


class Heart:
    """Beats until it is stopped, or the service says that it should not.

    `ends_s` is when the lease runs out, by this node's clock, counted from when the last renewal was asked for: it is
    never later than the service thinks. `cut_off`: the last try found nobody who could say that the service is away.
    """

    def __init__(self, client: AgentClient, lease: Lease, progress: Callable[[], Progress | None]) -> None:
        self.ends_s = time.monotonic() + lease.expires_in_s
        self.cut_off = False
        self.cancelled = False
        self.lost: LeaseLostError | None = None
        self.stop_reason: str | None = None
        self._client = client
        self._lease = lease
        self._progress = progress
        self._told: Progress | None = None
        self._asked_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        """Starts to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stops; a beat that is under way is left to itself."""
        self._stop.set()

    @property
    def over(self) -> bool:
        """Whether the owner should stop."""
        return self.cancelled or self.lost is not None or self.stop_reason is not None

    def cut_off_at(self, now_s: float) -> bool:
        """Whether nobody has answered lately: the last try failed so, or the present one waits for long."""
        asked_s = self._asked_s
        return self.cut_off or (asked_s is not None and now_s - asked_s > self._lease.expires_in_s / 6)

    def finish(self) -> None:
        """Tells of the last progress, once the job's process has ended."""
        self.stop()
        self._thread.join(_TELL_S)
        if self._progress() != self._told and not self.over and not self.cut_off:
            self._beat()

    def _run(self) -> None:
        interval_s = max(self._lease.expires_in_s / 3, _LEAST_S)
        beaten_s = time.monotonic()
        while not self._stop.wait(_LEAST_S) and not self.over:
            news = self._progress() != self._told
            if time.monotonic() - beaten_s >= (min(interval_s, _TELL_S) if news else interval_s):
                beaten_s = time.monotonic()
                self._beat()

    def _beat(self) -> None:
        """One renewal. A service out of reach does not stop the work: the end is reported when it is back."""
        progress, asked_s = self._progress(), time.monotonic()
        self._asked_s = asked_s
        try:
            answer = self._client.heartbeat(self._lease, progress)
        except LeaseLostError as error:
            self.lost = error
        except PipeplanError as error:
            self.cut_off = is_cut_off(error)
        else:
            self._told, self.cut_off = progress, False
            self.cancelled, self.stop_reason = answer.cancelled, answer.stop
            self.ends_s = asked_s + answer.expires_in_s
        finally:
            self._asked_s = None
