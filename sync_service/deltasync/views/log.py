"""The records of a view in the log: its history, the heads of its releases, and the ids that each released."""

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from deltasync.base.clock import Succession
from deltasync.base.decision import Decision
from deltasync.base.errors import StorageFailed
from deltasync.core.position import NOWHERE, Position, resume
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal, release_checksum
from deltasync.log.log_store import LAST_NUMBER, LogStore
from deltasync.log.records import (
    event_time_record,
    name_of,
    pack_ids,
    pack_json,
    reading,
    unpack_ids,
    unpack_json,
)
from deltasync.model.feed import ReleaseStatistics, RowTotals
from deltasync.model.releases import Head
from deltasync.views.table import ViewTable

# Of releases older than these it is no longer known which version they were made of, nor what their seals are.
KEPT_HEADS = 10_000


class ReleaseHistory:
    """The releases of one view. Added to by one call at a time, read on any thread.

    Releases are numbered from `first_version` on. Numbers up to it are versions of the model, older than the view.

    Attributes:
        id: the id of the view's history.
        first_version: the version at which the view began; 0 = it has no tables yet.
        succession: when each release became the newest.
    """

    def __init__(self, history_id: str | None = None, first_version: int = 0, heads: Iterable[Head] = ()) -> None:
        """Begin with the releases that are known, oldest first; without an id, a new history."""
        self.id = history_id or uuid.uuid4().hex
        self.first_version = first_version
        self.succession = Succession()
        self._heads: deque[Head] = deque(heads, maxlen=KEPT_HEADS)

    def add(self, head: Head, at_ns: int) -> None:
        """Note that a release is the newest one, since a time by `steady_ns`."""
        self._heads.append(head)
        self.succession.add(head.number, at_ns)

    @property
    def _newest(self) -> Head | None:
        return self._heads[-1] if self._heads else None

    def sealed(self, head: Head, of: Seal, made_unix_ns: int) -> Head:
        """The head of the next release, which is made of a version, with its seal."""
        before = self._newest.seal if self._newest else self.id
        return replace(head, seal=release_checksum(before, head.number, of, made_unix_ns))

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds.

        Of releases that are no longer known, nothing is but that they are not older than the view.
        """
        newest = self._newest
        head = newest if newest and number >= newest.number else self._head(number)
        known = head.version if head else self.first_version
        return min(number, known) if number <= self.first_version else known

    def seal_of(self, number: int) -> int:
        """The checksum of a release's seal; 0 where it is not known."""
        head = self._head(number)
        return head.seal if head else 0

    def _head(self, number: int) -> Head | None:
        """The head of a release, if it is known. All that are known have successive numbers."""
        while newest := self._newest:
            back = newest.number - number
            found = self._heads[-1 - back] if 0 <= back < len(self._heads) else None
            if found is None or found.number == number:
                return found
            if newest is self._newest:  # Otherwise, one was added meanwhile.
                return None
        return None

    def resume(
        self, held: Position, newest: int, of_model: Decision, acknowledged: Position = NOWHERE
    ) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that position is in this history.

        Args:
            held: what the replica says that it holds.
            newest: the number of the newest release; 0 = there is none.
            of_model: whether `held` is a version of the model, of its past. One from after the view began is no
                number of the view's.
            acknowledged: the replica's offset.
        """
        seal = self.seal_of(held.number)
        if of_model.yes and held.number <= self.first_version:
            decision = Decision(True, f"the replica holds version {held.number}, from before the policy")
            return decision, Position(self.id, held.number, seal)
        decision = resume(held, self.id, newest, seal, unit="release", acknowledged=acknowledged)
        return decision, Position(self.id, held.number, held.seal) if decision.yes else Position(self.id)


def view_name(consumer: str) -> str:
    """The name of the record of a consumer's view."""
    return f"view/{consumer}"


def releases_stream(consumer: str) -> str:
    """The stream of the ids of its releases."""
    return f"releases/{consumer}"


def heads_stream(consumer: str) -> str:
    """The stream of the heads of its newest releases."""
    return f"heads/{consumer}"


def head_record(head: Head) -> dict[str, Any]:
    """The record of a head."""
    record = {
        "number": head.number,
        "version": head.version,
        "step": head.step,
        "step_end_unix_ns": head.step_end_unix_ns,
        "seal": head.seal,
    }
    return record | event_time_record(head.event_time_unix_ns)


def head_of_record(record: Mapping[str, Any]) -> Head:
    """The head that a record describes."""
    return Head(
        number=record["number"],
        version=record["version"],
        step=record["step"],
        step_end_unix_ns=record["step_end_unix_ns"],
        event_time_unix_ns=record.get("event_time_unix_ns"),
        seal=record["seal"],
    )


def statistics_record(statistics: ReleaseStatistics) -> dict[str, Any]:
    """The record of a release's statistics."""
    taken, backlog = statistics.taken, statistics.backlog
    return {
        "number": statistics.number,
        "version": statistics.version,
        "made_unix_ns": statistics.made_unix_ns,
        "rows": taken.rows,
        "bytes": taken.bytes,
        "norm": taken.norm,
        "reason": statistics.reason,
        "left_rows": backlog.rows,
        "left_bytes": backlog.bytes,
        "left_norm": backlog.norm,
    }


def statistics_of_record(record: Mapping[str, Any]) -> ReleaseStatistics:
    """The statistics that a record describes."""
    return ReleaseStatistics(
        number=record["number"],
        version=record["version"],
        made_unix_ns=record["made_unix_ns"],
        taken=RowTotals(record["rows"], record["bytes"], record["norm"]),
        backlog=RowTotals(record["left_rows"], record["left_bytes"], record["left_norm"]),
        reason=record["reason"],
    )


def table_record(table: ViewTable) -> dict[str, Any]:
    """The record of what a table of a view is."""
    delivery = table.delivery
    return {
        "table": delivery.spec.name,
        "rows": delivery.spec.rows,
        "value_type": delivery.value_type and delivery.value_type.value,
        "mode": delivery.mode.value,
        "source": table.source.removed_before,
        "replaces": table.sent.removed_before,
        "born": table.born,
        "stamp": table.stamp,
    }


# Ids of one record.
_PIECE_IDS = 1 << 16
# Records handed to the log that are not on disk yet: others write to it as well.
_UNWRITTEN_RECORDS = 16


class ViewLog:
    """The records of a view. Every method blocks, except for `note`; any thread."""

    def __init__(self, log: LogStore, consumer: str) -> None:
        self._log = log
        self._name, self._heads, self._ids = view_name(consumer), heads_stream(consumer), releases_stream(consumer)

    def view(self) -> Mapping[str, Any] | None:
        """The record of the view; None if there is none.

        Raises:
            StorageFailed: it is damaged.
        """
        if (record := self._log.items(self._name).get("")) is None:
            return None
        with reading(f"record {self._name}"):
            found = unpack_json(record)
            return {name: found[name] for name in ("history", "model_history")}

    def write(self, head: Mapping[str, Any], ids: Sequence[Ids], view: Mapping[str, Any] | None) -> None:
        """Write a release down; doing it again after an error writes the same.

        Args:
            head: the record of its head.
            ids: the rows that it took, by slot.
            view: the record of the view that begins with the release.

        Raises:
            StorageFailed: the log refused some of it: there is no such release.
        """
        number, written = head["number"], list[Future[None]]()
        if view:
            written.append(self._log.put(self._name, pack_json(view)))
        for slot, some in enumerate(ids):
            for index, start in enumerate(range(0, len(some), _PIECE_IDS)):
                piece = some[start : start + _PIECE_IDS]
                written.append(self._log.append(self._ids, number, slot, index, pack_ids(piece), patient=True))
                if len(written) >= _UNWRITTEN_RECORDS:
                    written[-_UNWRITTEN_RECORDS].exception()  # The head is refused, too, if this was.
        self._log.append(self._heads, number, 0, 0, pack_json(head), after=written).result()

    def note(self, head: Mapping[str, Any]) -> None:
        """Write a head again that says more. Nobody waits for it: if it is refused, a restart knows less."""
        self._log.append(self._heads, head["number"], 0, 0, pack_json(head), patient=True)

    def heads(self, first: int = 0, last: int = LAST_NUMBER) -> Iterator[dict[str, Any]]:
        """The records of heads with numbers from `first` to `last`, oldest first.

        Raises:
            StorageFailed: one is damaged.
        """
        for each in self._log.read(self._heads, first, last):
            with reading(name_of(self._heads, each.number)):
                yield unpack_json(each.payload)

    def heads_before(self, newest: Mapping[str, Any]) -> list[Head]:
        """The heads of releases before the newest one, oldest first, back to where the seals no longer chain.

        Raises:
            StorageFailed: one is damaged.
        """
        heads, seal = deque[Head](), newest["after"]
        for record in reversed(list(self.heads(last=newest["number"] - 1))):
            if not seal or record["seal"] != seal:
                break
            heads.appendleft(head_of_record(record))
            seal = record["after"]
        return list(heads)

    def ids(self, head: Mapping[str, Any]) -> list[Ids]:
        """The rows ([n], ascending, by slot) that a release took.

        Raises:
            StorageFailed: some are damaged, or missing.
        """
        number, rows = head["number"], head["rows"]
        found: list[list[Ids]] = [[] for _ in rows]
        missing = list(rows)
        for each in self._log.read(self._ids, number, number) if any(rows) else ():
            # What there is beyond that is of a release of this number that was never finished.
            if each.part < len(rows) and missing[each.part] > 0:
                with reading(name_of(self._ids, number, each.part, each.index)):
                    found[each.part].append(unpack_ids(each.payload))
                missing[each.part] -= len(found[each.part][-1])
        if any(missing):
            raise StorageFailed(f"the log does not have the rows that release {number} took")
        return [np.concatenate([np.zeros(0, np.int64), *some]) for some in found]

    def cut(self, number: int, newest: int) -> None:
        """Drop what the log has up to release `number`, which checkpoints have; the newest one is `newest`.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        self._log.truncate(self._ids, number).result()
        self._log.truncate(self._heads, max(0, min(number, newest - KEPT_HEADS))).result()

    def discard(self) -> None:
        """Remove all records.

        Raises:
            StorageFailed: the log could not be written.
        """
        self._log.put(self._name, None).result()
        self._log.truncate(self._heads, LAST_NUMBER).result()
        self._log.truncate(self._ids, LAST_NUMBER).result()
