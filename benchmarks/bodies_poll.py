"""Requests /healthz continuously; for every line on standard input it writes its observations since the last one, as
JSON.
"""

import http.client
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

PAUSE_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The number of answers, and their times."""

    count: int
    p50_ms: float
    p99_ms: float
    worst_ms: float

    @staticmethod
    def of(several: Sequence["Seen"]) -> "Seen":
        """The mean of the medians, and the worst of the others."""
        count = sum(seen.count for seen in several)
        return Seen(
            count=count,
            p50_ms=sum(seen.p50_ms * seen.count for seen in several) / max(count, 1),
            p99_ms=max(seen.p99_ms for seen in several),
            worst_ms=max(seen.worst_ms for seen in several),
        )


class Poll:
    """The times so far, and the start of the request that has no answer yet."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._times_s: list[float] = []
        self._changed = threading.Condition()

    def run(self) -> None:
        """Requests without end."""
        while True:
            start_s = time.perf_counter()
            self._connection.request("GET", "/healthz")
            self._connection.getresponse().read()
            with self._changed:
                self._times_s.append(time.perf_counter() - start_s)
                self._changed.notify()
            time.sleep(PAUSE_S)

    def seen(self) -> Seen:
        """The observations since the last call, including the open request."""
        with self._changed:
            self._changed.wait()
            times_ms = sorted(1e3 * time_s for time_s in self._times_s)
            self._times_s.clear()
        return Seen(
            count=len(times_ms),
            p50_ms=times_ms[len(times_ms) // 2],
            p99_ms=times_ms[min(int(len(times_ms) * 0.99), len(times_ms) - 1)],
            worst_ms=times_ms[-1],
        )


def main() -> None:
    """Polls until standard input ends."""
    poll = Poll(int(sys.argv[1]))
    threading.Thread(target=poll.run, daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps(asdict(poll.seen())), flush=True)


if __name__ == "__main__":
    main()
