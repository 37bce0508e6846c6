"""A parser's process: it reads the documents that requests send, one after another.

python -m planner_service.platform.parser_process MEMORY_BYTES CPU_S     0: no limit
"""

import gc
import sys
from collections.abc import Callable

from planner_service.platform.parsing import Sent
from planner_service.platform.processes.child import serve


def main() -> None:
    """Answers until standard input ends."""
    gc.disable()  # a document has no cycles, and searching for them repeatedly doubles the time to read it

    def read(sent: Sent, _tell: Callable[[None], None]) -> object:
        gc.collect()
        return sent.read(sent.content)

    serve(read, memory_bytes=int(sys.argv[1]), cpu_s=float(sys.argv[2]))


if __name__ == "__main__":
    main()
