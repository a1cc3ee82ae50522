"""How a log among brokers can be lost to the process that has it."""

from deltasync.core.errors import StorageFailed


class Fenced(StorageFailed):
    """Another owner has appended to the log: this process may write nothing to it any more."""


class LogWentBack(StorageFailed):
    """The log has lost what it had acknowledged, or is gone."""
