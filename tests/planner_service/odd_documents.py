"""What reads documents in a parser's process, and misbehaves: wants too much memory, never ends, crashes."""

import os
import time


def process_of(_content: bytes) -> int:
    """The process that reads."""
    return os.getpid()


def greedy(_content: bytes) -> int:
    """Wants more memory than there is."""
    return len(bytearray(2**40))


def endless(_content: bytes) -> int:
    """Takes processor time without end."""
    while True:
        pass


def patient(_content: bytes) -> int:
    """Takes no processor time, and does not end."""
    time.sleep(1000)
    return 0


def crash(_content: bytes) -> int:
    """A fault of ours."""
    raise KeyError("a fault of ours")
