"""Compare rows that are stored elsewhere with the rows that a service sends to a consumer's replicas."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.base.arguments import guest_name
from deltasync.base.errors import Contradiction
from deltasync.base.progress import Progress
from deltasync.client.checkpoint_start import newest_start
from deltasync.client.endpoint import Endpoint
from deltasync.client.options import SubscriberOptions
from deltasync.client.subscriber import Subscriber
from deltasync.client.targets.target import Release
from deltasync.core.comparison import MOST_NAMED, ComparisonStatus, TableComparison
from deltasync.core.digests import RowDigests, checksum, row_digests
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import TableSpec

Rows: TypeAlias = Iterable[tuple[Ids, Values]]
S = TypeVar("S", bound=np.generic)

_NO_DIGESTS, _NO_MASK = np.empty(0, np.uint64), np.empty(0, np.bool_)


@dataclass(frozen=True)
class StoredCopy:
    """Tables of a model that are stored outside of the service.

    Attributes:
        name: a name for messages.
        position: the position of the rows; some rows may be newer. Empty if unknown.
        rows: reads a table in pieces: ids [n], and values [n, dim] of its type. Missing rows are zeros. Returns
            None for a table that is not stored.
        made_of: the consumer whose replicas have these rows; empty if they are the model's own.
    """

    name: str
    position: Position
    rows: Callable[[TableSpec], Rows | None]
    made_of: str = ""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing a copy.

    Attributes:
        version: the model's version in the service.
        since: whether rows that changed after the copy was made were left out.
        tables: the results for the consumer's tables.
    """

    version: int
    since: bool
    tables: Sequence[TableComparison]


def compare(service: Endpoint | str, consumer: str, copy: StoredCopy, timeout_seconds: float) -> Comparison:
    """Compare a copy with the current rows of a consumer's replicas, row by row.

    Subscribes to the consumer twice: first for all rows, then for the rows that changed after the copy was made.
    Keeps 9 bytes per row in memory.

    Args:
        service: the gRPC endpoint, with credentials of role subscribe.
        consumer: the name of the consumer.
        copy: the copy.
        timeout_seconds: timeout of each of the two subscriptions.

    Raises:
        TimeoutError: a subscription took longer.
        Contradiction: the consumer's mode is `ids`, or the copy's tables have another shape or type.
        DeltasyncError: the service refuses to send its rows.
    """
    now, since = _Seen(), _Seen()
    options = SubscriberOptions(service=service, consumer=consumer, replica=guest_name("verify"), guest=True)
    head = _follow(options, now, Position(), timeout_seconds)
    if not copy.made_of and now.history != head.history:
        raise Contradiction(f"consumer {consumer!r} has a policy, so rows may differ: use a consumer without one")
    left_out = copy.position.number > 0
    if left_out:
        _follow(replace(options, held=copy.position), since, head, timeout_seconds)
        left_out = not since.everything  # With another history, the changes since the copy are unknown.
    tables = [_compared(copy, each, now, since if left_out else _Seen()) for each in now.tables]
    return Comparison(head.number, left_out, tables)


def stored_checkpoint(url: str, consumer: str) -> StoredCopy:
    """The newest checkpoint of a consumer's model in a folder or at a URL.

    Raises:
        InvalidInput: the URL's scheme is not supported, or its package is not installed.
        NotFound: there is no checkpoint.
        StorageFailed: the checkpoint cannot be read, or is damaged.
        Contradiction: the consumer's mode is `ids`.
    """
    name, start = newest_start(url, consumer)
    names = {table.name for table in start.release.tables}

    def rows(table: TableSpec) -> Rows | None:
        batches = [each for each in start.release.rows if each.table.name == table.name]
        return ((each.ids, each.values) for each in batches) if table.name in names else None

    return StoredCopy(f"checkpoint {name}", start.position, rows, made_of=consumer)


def _follow(options: SubscriberOptions, seen: "_Seen", least: Position, timeout_seconds: float) -> Position:
    """Subscribe until `seen` has the current rows, at `least` or later; return their position."""
    with Subscriber(options, seen) as subscriber:
        subscriber.wait_until_ready(timeout_seconds)
        if least.number:
            subscriber.wait_for(least, timeout_seconds)
        return subscriber.version


def _compared(copy: StoredCopy, table: TableSpec, now: "_Seen", since: "_Seen") -> TableComparison:
    rows = copy.rows(table)
    if rows is None:
        return TableComparison(table.name, 0, ComparisonStatus.NOT_HELD)
    expected, actual, changed = now.digests(table), _digests(copy, table, rows), since.came(table)
    ids = np.flatnonzero((actual != expected) & ~changed)
    compared = np.flatnonzero(~changed)
    return TableComparison(
        table.name,
        len(compared),
        ComparisonStatus.DIFFERS if len(ids) else ComparisonStatus.EQUAL,
        checksum(compared, expected[compared]),
        checksum(compared, actual[compared]),
        ids[:MOST_NAMED],
        len(ids),
        int(changed.sum()),
    )


def _digests(copy: StoredCopy, table: TableSpec, rows: Rows) -> RowDigests:
    """The digest of each row of a table in the copy."""
    digests = np.zeros(table.rows, np.uint64)
    progress = Progress(f"{copy.name}: reading table {table.name!r}", table.rows)
    for ids, values in rows:
        if (values.shape[1], values.dtype) != (table.dim, table.dtype):
            form = f"rows of {values.shape[1]} {values.dtype}"
            raise Contradiction(
                f"{copy.name} has {form} in table {table.name!r}, replicas have {table.dim} {table.dtype}"
            )
        if len(ids) and ids[-1] >= table.rows:
            raise Contradiction(
                f"{copy.name} has row {ids[-1]} of table {table.name!r}, which has {table.rows} rows"
            )
        digests[ids] = row_digests(values)
        progress.add(len(ids))
    return digests


class _Seen:
    """A target that keeps only the digest of each row and a mask of received rows.

    Attributes:
        takes_parts: see `GradualTarget`.
    """

    takes_parts = True

    def __init__(self) -> None:
        self.tables: Sequence[TableSpec] = ()
        self.history, self.everything = "", False
        self._digests = dict[str, RowDigests]()
        self._came = dict[str, Mask]()

    def apply(self, release: Release) -> None:
        """Apply a release."""
        release.check_values()
        self.tables, self.history = release.tables, release.position.history
        self.everything |= release.resync
        for table in release.tables:
            if release.resets(table):
                self._digests[table.name] = np.zeros(table.rows, np.uint64)
                self._came[table.name] = np.ones(table.rows, np.bool_)
            else:
                self._digests[table.name] = _grown(self._digests.get(table.name, _NO_DIGESTS), table.rows)
                self._came[table.name] = _grown(self._came.get(table.name, _NO_MASK), table.rows)
        progress = Progress("reading the service's rows", sum(map(len, release.rows)))
        for batch in release.rows:
            digests = batch.digested().digests
            self._digests[batch.table.name][batch.ids] = 0 if digests is None else digests
            self._came[batch.table.name][batch.ids] = True
            progress.add(len(batch))

    def digests(self, table: TableSpec) -> RowDigests:
        """The digest of each row of a table."""
        return self._digests[table.name]

    def came(self, table: TableSpec) -> Mask:
        """A mask of the received rows of a table."""
        return _grown(self._came.get(table.name, _NO_MASK), table.rows)


def _grown(array: NDArray[S], rows: int) -> NDArray[S]:
    """The array, extended to `rows` rows with zeros."""
    more = max(0, rows - len(array))
    return np.concatenate([array[:rows], np.zeros(more, array.dtype)])
