"""What brokers refuse, and how a log among them can be lost to the process that has it."""

from typing import Any

from deltasync.core.errors import StorageFailed

LOOK_AT_BROKERS = "look at the brokers"


class Fenced(StorageFailed):
    """Another owner has appended to the log: this process may write nothing to it any more."""


class LogWentBack(StorageFailed):
    """The log has lost what it had acknowledged, or is gone."""


def refused_by_brokers(stream: str, error: dict[str, Any]) -> str:
    """What brokers have refused, as they say it, and what to do."""
    return f"stream {stream}: {error.get('description')}: {LOOK_AT_BROKERS}"
