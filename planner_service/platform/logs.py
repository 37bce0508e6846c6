"""Logs: one line an event on standard error, as JSON for machines or as plain text for a person.

A separate thread writes the lines: a reader that stalls cannot stop the service. Lines that do not fit in the queue are
dropped, and the next line says how many. Control characters are
escaped, to keep an event on one line. Texts that look like secrets are masked.
"""

import json
import logging
import queue
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

from pipeplan.protocol.tokens import masked

LogFormat = Literal["auto", "json", "human"]
LogLevel = Literal["debug", "info", "warning", "error"]

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered; None outside of requests."""

QUEUED_LINES = 20_000
PAUSE_S = 0.05
CLOSING_S = 2.0
TEXTS_OF_OTHERS = ("uvicorn", "alembic", "asyncio", "sqlalchemy", "httpx", "httpcore")
"""Libraries whose lines below a warning do not help an operator."""


def configure(level: LogLevel, form: LogFormat, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to the stream (standard error unless given); "auto" is plain on a terminal."""
    target = sys.stderr if stream is None else stream
    handler = LineHandler(target)
    handler.setFormatter(JsonFormatter() if is_json(form, target) else HumanFormatter())
    root = logging.getLogger()
    for former in [known for known in root.handlers if isinstance(known, LineHandler)]:
        root.removeHandler(former)
        former.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in TEXTS_OF_OTHERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def is_json(form: LogFormat, stream: TextIO | None = None) -> bool:
    return not (sys.stderr if stream is None else stream).isatty() if form == "auto" else form == "json"


def tell(event: str) -> None:
    """Writes a line at any level, because the process's parent waits for it."""
    record = logging.LogRecord("pipeplan", logging.INFO, "", 0, event, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.emit(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, request_id, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, in ASCII."""
        line = json.dumps(_described(record), default=str)
        return masked(line).replace("\x7f", "\\u007f")


class HumanFormatter(logging.Formatter):
    """The time, the level, the event and its fields; a traceback follows, every line of it marked."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the traceback's lines."""
        described = _described(record)
        traceback = described.pop("traceback", "")
        moment, level, _, event = (str(described.pop(key)) for key in ("time", "level", "logger", "event"))
        fields = "".join(f" {name}={_printable(str(value))}" for name, value in described.items())
        marked = "".join(f"\n  | {_printable(line)}" for line in traceback.splitlines())
        return masked(f"{moment[11:19]} {level:<7} {_printable(event)}{fields}{marked}")


class LineHandler(logging.Handler):
    """Hands lines to a thread that writes them."""

    def __init__(self, stream: TextIO, most_lines: int = QUEUED_LINES) -> None:
        super().__init__()
        self.dropped = 0
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(most_lines)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="logs", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line; never waits."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes the queued lines, if the stream takes them in time."""
        self._closing.set()
        self._thread.join(CLOSING_S)
        super().close()

    def _write(self) -> None:
        while not (self._closing.is_set() and self._lines.empty()):
            lines = [self._lines.get_nowait() for _ in range(self._lines.qsize())]
            if self.dropped:
                text = f"{self.dropped} lines were dropped: standard error is not read fast enough"
                record = logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None)
                lines.append(self.format(record))
                self.dropped = 0
            try:
                if lines:
                    self._stream.write("\n".join(lines) + "\n")
                    self._stream.flush()
            except (OSError, ValueError):
                return  # nothing reads the stream any more
            self._closing.wait(PAUSE_S)


def _described(record: logging.LogRecord) -> dict[str, str]:
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    described = {"time": moment, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
    request_id = REQUEST_ID.get()
    if request_id is not None:
        described["request_id"] = request_id
    described |= getattr(record, "fields", {})
    if record.exc_info:
        described["traceback"] = logging.Formatter().formatException(record.exc_info)
    return described


def _printable(text: str) -> str:
    """The text with its control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
