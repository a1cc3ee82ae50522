"""The logs of a service's models: one for all, or each in one of its own that another process can take over."""

from collections.abc import Sequence
from typing import Protocol

from deltasync.core.durations import Durations
from deltasync.storage.log_store import LogStore


class Logs(Protocol):
    """What the models of a service are written down in, and their consumers. Any thread.

    Attributes:
        commits: how long it took to bring what was submitted to the disk.
        accepted_risks: how what was acknowledged could be lost all the same, in words.
    """

    commits: Durations
    accepted_risks: list[str]

    def of(self, model: str) -> LogStore:
        """The log of a model, with all that its consumers hold.

        Raises:
            NotOwner: another process of the service has it.
        """

    def each(self) -> Sequence[LogStore]:
        """All logs that are open, each once."""

    @property
    def refusing(self) -> bool:
        """Whether one of them has no room."""

    def close(self) -> None:
        """Write what was submitted, and end. Blocks."""


class EmbeddedLogs:
    """All models in one log, of the service's own: a `Logs`."""

    def __init__(self, log: LogStore) -> None:
        self._log, self.commits = log, log.commits
        self.accepted_risks: list[str] = []

    def of(self, _model: str) -> LogStore:
        """The log of a model: that of all."""
        return self._log

    def each(self) -> Sequence[LogStore]:
        """The one that there is."""
        return [self._log]

    @property
    def refusing(self) -> bool:
        """Whether it has no room."""
        return self._log.refusing

    def close(self) -> None:
        """Write what was submitted, and end."""
        self._log.close()
