"""What a child process says to whoever asks it, pickled, through its standard output."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeplan.errors import PipeplanError

N = TypeVar("N")
A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class News(Generic[N]):
    """How far the child is."""

    content: N


@dataclass(frozen=True, slots=True)
class Done(Generic[A]):
    """The answer."""

    answer: A


@dataclass(frozen=True, slots=True)
class Refused:
    """What was asked raised this."""

    error: PipeplanError


@dataclass(frozen=True, slots=True)
class Exhausted:
    """The memory that the process may have was not enough."""


Message = News[N] | Done[A] | Refused | Exhausted
"""Any number of News, then one of the others."""
