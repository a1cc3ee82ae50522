"""Logging of our own processes, text on a terminal and JSON elsewhere; and the progress of long work."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO, get_args
from weakref import WeakSet

from deltasync.base.errors import InvalidInput
from deltasync.base.words import printable

LogFormat = Literal["auto", "text", "json"]
LEVELS = ("debug", "info", "warning", "error")
# The attribute of a log record with the fields of its event.
FIELDS = "deltasync_fields"
# Maximum characters of a message or traceback line, and of a whole traceback.
_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 2_000, 20_000
_OURS = "deltasync"
# This logger writes bytes of any peer, and a line for each invalid message.
_LOUD = {"uvicorn.error": logging.ERROR}


def log_to_stderr(form: str = "", levels: str = "") -> None:
    """Log our messages from level INFO, warnings of other packages, and only failures of gRPC and uvicorn.

    Call it before gRPC is used. Without a `LogFormat` and levels (see `set_levels`), DELTASYNC_LOG_FORMAT and
    DELTASYNC_LOG_LEVEL count.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name, level in _LOUD.items():
        logging.getLogger(name).setLevel(level)
    form = form or os.environ.get("DELTASYNC_LOG_FORMAT") or "auto"
    if form not in (formats := get_args(LogFormat)):
        raise InvalidInput(f"log format {form!r}: expected one of {', '.join(formats)}")
    as_text = sys.stderr.isatty() if form == "auto" else form == "text"
    formatter = _Lines("%(asctime)s %(levelname)s %(name)s %(message)s") if as_text else _json_lines()
    if ours := next((each for each in logging.root.handlers if isinstance(each, _Handler)), None):
        ours.setFormatter(formatter)
    else:
        handler = _Handler()
        handler.setFormatter(formatter)
        logging.basicConfig(handlers=[handler])  # Does nothing if there are other handlers.
    logging.getLogger(_OURS).setLevel(logging.INFO)
    if levels := levels or os.environ.get("DELTASYNC_LOG_LEVEL", ""):
        set_levels(levels)


def set_levels(text: str) -> None:
    """Set the lowest levels to log: `debug`, or for single loggers too: `info,deltasync.api=debug`."""
    for name, level in parse_levels(text).items():
        logging.getLogger(name).setLevel(level)


def parse_levels(text: str) -> dict[str, int]:
    """Parse the text of `set_levels`."""
    parsed = dict[str, int]()
    for each in text.split(","):
        name, equals, level = each.strip().rpartition("=")
        if level not in LEVELS or (equals and name.partition(".")[0] != _OURS):
            raise InvalidInput(f"log level {each!r}: expected one of {', '.join(LEVELS)}, or {_OURS}.NAME=LEVEL")
        parsed[name or _OURS] = logging.getLevelNamesMapping()[level.upper()]
    return parsed


def levels() -> dict[str, str]:
    """The levels set for our loggers, by name."""
    loggers = {_OURS: logging.getLogger(_OURS), **logging.root.manager.loggerDict}
    return {
        name: logging.getLevelName(each.level).lower()
        for name, each in sorted(loggers.items())
        if isinstance(each, logging.Logger) and name.partition(".")[0] == _OURS and each.level
    }


class _Handler(logging.StreamHandler[TextIO]):
    """The handler of this module."""


class _Lines(logging.Formatter):
    """Formats each message as one line of limited length, so that text of a peer cannot imitate another line.

    Only the lines of a traceback are indented.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # as in logging
        record.message = printable(record.message, _LONGEST_MESSAGE)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # as in logging
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line, _LONGEST_MESSAGE)}" for line in lines)


def _json_lines() -> logging.Formatter:
    import structlog  # Part of the service; the client leaves logs to its process.

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
        ],
        processors=[_fields, structlog.processors.JSONRenderer()],
    )


def _fields(_logger: Any, _name: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a JSON line: the common ones, and those of its event."""
    fields: Mapping[str, Any] = getattr(said["_record"], FIELDS, {})
    line = {name: said[name] for name in ("time", "level", "logger")}
    line["event"] = fields.get("event", "message")
    line |= {name: _plain(value) for name, value in fields.items() if name != "event"}
    if "text" not in fields:
        line["text"] = printable(str(said["event"]), _LONGEST_MESSAGE)
    if traceback := said.get("exception"):
        line["traceback"] = str(traceback)[-_LONGEST_TRACEBACK:]
    return line


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) else printable(str(value), _LONGEST_MESSAGE)


logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0
_SOON_SECONDS = 1.0


class Progress:
    """Logs the progress of work every few seconds, and lists it in `under_way` while this object exists."""

    def __init__(
        self, what: str, total: int, unit: str = "rows", now: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin work of `total` rows, such as "consumer 'top': comparing table 'user'"."""
        self._what, self._total, self._unit, self._now = what, total, unit, now
        self._begun = now()
        self._due, self._logged, self._rows = self._begun + _EVERY_SECONDS, False, 0
        with _lock:
            _all.add(self)

    def add(self, rows: int) -> None:
        """Add finished rows."""
        self.at(self._rows + rows)

    def at(self, rows: int) -> None:
        """Set the number of finished rows."""
        self._rows, now = rows, self._now()
        if now >= self._due or (self._logged and rows >= self._total):
            logger.info("%s", self.description)
            self._due, self._logged = now + _EVERY_SECONDS, True

    @property
    def description(self) -> str:
        """The work and its progress."""
        return f"{self._what}: {self._rows} of {self._total} {self._unit}"

    @property
    def takes_long(self) -> bool:
        """Whether the work has taken a while and is not finished."""
        return self._rows < self._total and self._now() >= self._begun + _SOON_SECONDS


_all, _lock = WeakSet[Progress](), threading.Lock()


def under_way() -> list[str]:
    """The progress of long work in this process."""
    with _lock:
        return sorted(each.description for each in _all if each.takes_long)
