"""The logs of a service's models: one for all, or each in one of its own that another process can take over."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogOptions, LogStore


class Logs(Protocol):
    """What models are written down in."""

    def of(self, model: str) -> LogStore:
        """The log of a model, with what consumers of it hold.

        Raises:
            NotOwner: another process has it.
        """

    def each(self) -> Sequence[LogStore]:
        """All logs that are open, each once."""

    def close(self) -> None:
        """Write what was submitted, and end. Blocks."""


class EmbeddedLogs:
    """All models in one log, in LMDB: a `Logs`.

    Raises:
        StorageFailed: it is damaged, or of a later version.
    """

    def __init__(self, options: LogOptions, models: Path) -> None:
        self._log = LmdbStore(options)
        try:
            check_log(self._log, models)
        except BaseException:
            self._log.close()
            raise

    def of(self, _model: str) -> LogStore:
        """The log of a model: that of all."""
        return self._log

    def each(self) -> Sequence[LogStore]:
        """The one that there is."""
        return [self._log]

    def close(self) -> None:
        """Write what was submitted, and end."""
        self._log.close()
