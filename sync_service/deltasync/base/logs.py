"""What our own processes write of themselves: lines on a terminal, JSON elsewhere."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from deltasync.base.errors import InvalidInput
from deltasync.base.words import printable

FORMATS = ("auto", "text", "json")
LEVELS = ("debug", "info", "warning", "error")
# The attribute of a log record that has what its message is made of, by name.
FIELDS = "deltasync_fields"
# Of a message, and of a line of a traceback; and of a traceback as a whole.
_LONGEST_MESSAGE, _LONGEST_TRACEBACK = 2_000, 20_000
_OURS = "deltasync"
# They write what any peer sends, as it is, and a line for each message that makes no sense.
_LOUD = {"uvicorn.error": logging.ERROR}


def log_to_stderr(form: str = "", levels: str = "") -> None:
    """Log our own messages from INFO on, and warnings of other packages; of gRPC's core and of uvicorn no more
    than failures. Call it before gRPC is used.

    Args:
        form: one of `FORMATS`; empty = that of DELTASYNC_LOG_FORMAT, or auto: text on a terminal, JSON elsewhere.
        levels: as of `set_levels`; empty = those of DELTASYNC_LOG_LEVEL, if there are any.

    Raises:
        InvalidInput: one of them is something else.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name, level in _LOUD.items():
        logging.getLogger(name).setLevel(level)
    form = form or os.environ.get("DELTASYNC_LOG_FORMAT") or "auto"
    if form not in FORMATS:
        raise InvalidInput(f"log format {form!r}: expected one of {', '.join(FORMATS)}")
    as_text = sys.stderr.isatty() if form == "auto" else form == "text"
    formatter = _Lines("%(asctime)s %(levelname)s %(name)s %(message)s") if as_text else _json_lines()
    if ours := next((each for each in logging.root.handlers if isinstance(each, _Handler)), None):
        ours.setFormatter(formatter)
    else:
        handler = _Handler()
        handler.setFormatter(formatter)
        logging.basicConfig(handlers=[handler])  # Which leaves those alone that somebody else has made.
    logging.getLogger(_OURS).setLevel(logging.INFO)
    if wanted := levels or os.environ.get("DELTASYNC_LOG_LEVEL", ""):
        set_levels(wanted)


def set_levels(wanted: str) -> None:
    """Say from which level on messages are written: `debug`, or of some loggers `info,deltasync.api=debug`.

    Raises:
        InvalidInput: it is something else; nothing has changed.
    """
    for name, level in parse_levels(wanted).items():
        logging.getLogger(name).setLevel(level)


def parse_levels(wanted: str) -> dict[str, int]:
    """The levels of loggers that a text names.

    Raises:
        InvalidInput: it names something else.
    """
    found = dict[str, int]()
    for each in wanted.split(","):
        name, equals, level = each.strip().rpartition("=")
        if level not in LEVELS or (equals and name.partition(".")[0] != _OURS):
            raise InvalidInput(f"log level {each!r}: expected one of {', '.join(LEVELS)}, or {_OURS}.NAME=LEVEL")
        found[name or _OURS] = logging.getLevelNamesMapping()[level.upper()]
    return found


def levels() -> dict[str, str]:
    """The levels of our loggers that have one of their own, by their names."""
    loggers = {_OURS: logging.getLogger(_OURS), **logging.root.manager.loggerDict}
    return {
        name: logging.getLevelName(each.level).lower()
        for name, each in sorted(loggers.items())
        if isinstance(each, logging.Logger) and name.partition(".")[0] == _OURS and each.level
    }


class _Handler(logging.StreamHandler[TextIO]):
    """The one that this module has made."""


class _Lines(logging.Formatter):
    """Formats messages as one line each, of bounded length: what others have said cannot look like another line.
    The lines of a traceback are indented, and no others.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # as in logging
        record.message = printable(record.message, _LONGEST_MESSAGE)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # as in logging
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line, _LONGEST_MESSAGE)}" for line in lines)


def _json_lines() -> logging.Formatter:
    import structlog  # Not where only the client is installed: whose logs are its own process's.

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
    """One line's keys: always the same ones, and those of what it concerns."""
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
