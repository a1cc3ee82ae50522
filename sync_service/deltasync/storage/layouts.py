"""What the ranks of a model's runs hold, in the log: written once, and not with every part of every cut."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from deltasync.core.errors import StorageFailed
from deltasync.core.tables import Shard
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import LAST_NUMBER, LogStore, LogUnavailable
from deltasync.storage.records import layout_number, name_of, reading, unpack_layout
from deltasync.storage.volume import VolumeFailed


@dataclass
class _Layout:
    """A layout that the log has, or will have once `written` is done.

    `newest` is the last version of which it may have rows.
    """

    shards: Sequence[Shard]
    written: Future[None]
    newest: int


@dataclass(frozen=True)
class LayoutUse:
    """A layout that rows may name.

    Attributes:
        number: by which they name it.
        log_bytes: bytes that were handed to the log for it now.
        written: done once the log has it.
    """

    number: int
    log_bytes: int
    written: Future[None]


class Layouts:
    """The layouts of one model that its log has. Used from any thread.

    What is decided and what is submitted to the log because of it happen under one lock: else a cut of the log
    could forget a layout that a part has just been promised.
    """

    def __init__(self, log: LogStore, model: str) -> None:
        self._log = log
        self._stream = f"layouts/{model}"
        self._layouts: dict[int, _Layout] = {}
        self._damage = ""
        self._lock = threading.Lock()

    def recover(self) -> None:
        """Find the layouts that the log has. None is forgotten before `note_newest` says which rows there are.

        Layouts from a damaged one on are missing: `shards` says so to whoever needs one of them.

        Raises:
            LogUnavailable, VolumeFailed: the log cannot be read now.
        """
        written: Future[None] = Future()
        written.set_result(None)
        try:
            for record in self._log.read(self._stream):
                with reading(name_of(self._stream, record.number)):
                    self._layouts[record.number] = _Layout(unpack_layout(record.payload), written, LAST_NUMBER)
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed as error:
            self._damage = str(error)

    def note_newest(self, version: int) -> None:
        """Note that of the layouts that were found there are no rows of versions after this one."""
        with self._lock:
            for layout in self._layouts.values():
                layout.newest = min(layout.newest, version)

    def use(self, record: bytes, shards: Sequence[Shard], version: int) -> LayoutUse:
        """Have a layout for rows of a version. It is written unless the log has it.

        Args:
            record: the layout, packed.
            shards: the shards in it.
            version: the version, which is not sealed yet.
        """
        number = layout_number(record)
        with self._lock:
            layout = self._layouts.get(number)
            log_bytes = 0 if layout else len(record)
            if layout is None:
                written = self._log.append(self._stream, number, 0, 0, record)
                layout = self._layouts[number] = _Layout(shards, written, version)
            layout.newest = max(layout.newest, version)
        layout.written.add_done_callback(partial(self._forget_unwritten, number))
        return LayoutUse(number, log_bytes, layout.written)

    def shards(self, number: int) -> Sequence[Shard]:
        """The shards of a layout.

        Raises:
            StorageFailed: the log does not have it.
        """
        layout = self._layouts.get(number)
        if layout is None:
            raise StorageFailed(self._damage or f"the log's {name_of(self._stream, number)} is missing: {RESTORE}")
        return layout.shards

    def forget(self, upto: int) -> list[Future[None]]:
        """Forget the layouts of which there are rows of versions up to `upto` only; done once the log has, too."""
        with self._lock:
            forgotten = [number for number, layout in self._layouts.items() if layout.newest <= upto]
            for number in forgotten:
                del self._layouts[number]
            return [self._log.drop(self._stream, number, 0) for number in forgotten]

    def _forget_unwritten(self, number: int, written: Future[None]) -> None:
        with self._lock:
            if written.exception() and self._layouts.get(number) and self._layouts[number].written is written:
                del self._layouts[number]
