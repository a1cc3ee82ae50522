"""Which tables of a model a policy follows, how ranks may change them, and what of them is published."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.wire.row_messages import CHUNK_BYTES

# So many patterns are remembered; operators may change them as often as they like.
_MOST = 4096


@dataclass(frozen=True)
class _Known:
    tables: list[StampedTable]
    count: int
    followed: dict[tuple[str, ...], tuple[StampedTable, ...]] = field(default_factory=dict)


class FollowedTables:
    """Used by one model, on any thread: what is known is replaced whole, and may be found twice."""

    def __init__(self) -> None:
        self._known = _Known([], 0)

    def of(self, policy: Policy, tables: list[StampedTable]) -> tuple[StampedTable, ...]:
        """The tables that a policy follows, of a list that is only appended to, or replaced."""
        known = self._known
        if known.tables is not tables or known.count != len(tables) or len(known.followed) >= _MOST:
            known = self._known = _Known(tables, len(tables))
        if (found := known.followed.get(policy.tables)) is None:
            found = known.followed[policy.tables] = tuple(each for each in tables if policy.follows(each.spec))
        return found


def changes(
    model: str, known: Mapping[str, TableSpec], announced: Collection[TableSpec], *, later_run: bool
) -> list[TableSpec]:
    """The tables that are new, or are to be something else than they are, as they are to be.

    In a later run a table may have more rows.

    Args:
        model: the model's name.
        known: its tables, by name.
        announced: those that a run has.
        later_run: whether it is another run than the one that published last; all ranks of a run have the same.

    Raises:
        Contradiction: a table has fewer rows than it had, or is otherwise something else.
    """
    for table in announced:
        if table.name not in known:
            _check_names(model, known, table)
    wanted = [_wanted(model, known.get(table.name), table, later_run=later_run) for table in announced]
    return [table for table in wanted if table != known.get(table.name)]


def _check_names(model: str, known: Mapping[str, TableSpec], announced: TableSpec) -> None:
    """Check that no other table has one of the names of a new one, as where weights were tied otherwise before."""
    for table in known.values():
        if both := sorted({*table.names} & {*announced.names}):
            raise Contradiction(
                f"table {announced.name!r} of the run is tied to {', '.join(announced.aliases) or 'nothing'}, and "
                f"model {model!r} has {both[0]!r} in table {table.name!r}: delete that table first (deltasync "
                "tables delete)"
            )


def _wanted(model: str, known: TableSpec | None, announced: TableSpec, *, later_run: bool) -> TableSpec:
    """What a table is to be."""
    if known is None or known == announced:
        return announced
    if later_run and known.rows < announced.rows and announced == replace(known, rows=announced.rows):
        return announced
    raise Contradiction(
        f"table {announced.name!r} of model {model!r} is {_words(known, announced)}, the run has "
        f"{_words(announced, known)}: a table can get more rows in a later run, and change in nothing else; "
        "publish it under another model (SyncOptions(model=...), --model NAME), or under another table name"
    )


def _words(table: TableSpec, other: TableSpec) -> str:
    """A table's rows and type, and what else it has that the other has not."""
    kind = f"{table.kind.value} " if table.kind is not other.kind else ""
    of = f" of {table.of!r}" if table.of != other.of else ""
    shape = f" of shape {list(table.shape or ())}" if table.sizes != other.sizes else ""
    aliases = f", tied to {', '.join(table.aliases) or 'nothing'}" if table.aliases != other.aliases else ""
    return f"{kind}{table.rows} x {table.dim} {table.dtype}{shape}{of}{aliases}"


def published_rows(table: StampedTable, grown_from: int, whole: Set[str]) -> int:
    """How many rows of a table were published: all, unless none of those that it has grown by was.

    Args:
        table: the table.
        grown_from: how many rows it had before it last grew; 0 if it has not.
        whole: tables of which a cut has said what rows there are: it may be that none is left.
    """
    known = table.stamps[grown_from:].any() or (not grown_from and table.spec.name in whole)
    return table.spec.rows if known else grown_from


def cut_rows(batches: Iterable[RowBatch], slots: Mapping[str, int]) -> list[tuple[int, RowBatch]] | None:
    """The rows of a cut, whole and each once, with the slots of their tables.

    Args:
        batches: the rows, by shard.
        slots: of the tables, by name.

    Returns:
        None where that takes a look at the tables: of some rows there are only some columns, or a row comes twice.
    """
    live: dict[str, list[RowBatch]] = {}
    deleted: dict[str, list[RowBatch]] = {}
    for batch in filter(len, batches):
        if batch.shard.cols < batch.table.dim:
            return None
        (deleted if batch.deleted else live).setdefault(batch.table.name, []).append(batch)
    for some in (live, deleted):
        for of_table in some.values():
            of_table.sort(key=lambda batch: int(batch.ids[0]))
    if not all(map(_disjoint, (*live.values(), *deleted.values()))):
        return None
    if any(_meet(live[name], deleted[name]) for name in live.keys() & deleted.keys()):
        return None
    every = (*live.items(), *deleted.items())
    return [(slots[name], _joined(some)) for name, of_table in every for some in _gathered(of_table)]


def _disjoint(batches: Sequence[RowBatch]) -> bool:
    return all(before.ids[-1] < after.ids[0] for before, after in pairwise(batches))


def _meet(some: Sequence[RowBatch], others: Sequence[RowBatch]) -> bool:
    """Whether a row is in both."""
    ids = np.sort(np.concatenate([batch.ids for batch in (*some, *others)]), kind="stable")
    return bool((ids[1:] == ids[:-1]).any())


def _gathered(batches: Sequence[RowBatch]) -> Iterable[list[RowBatch]]:
    """The batches of a table, small ones together: each message costs something, and there may be many ranks."""
    together: list[RowBatch] = []
    for batch in batches:
        if together and sum(each.nbytes for each in together) + batch.nbytes > CHUNK_BYTES:
            yield together
            together = []
        together.append(batch)
    if together:
        yield together


def _joined(batches: Sequence[RowBatch]) -> RowBatch:
    first, whole = batches[0], Shard.whole(batches[0].table)
    if len(batches) == 1:
        return replace(first, shard=whole)  # It is sent in the bytes in which it came.
    ids = np.concatenate([batch.ids for batch in batches])
    if first.deleted:
        return RowBatch.deletes(whole, ids)
    values = np.concatenate([batch.values for batch in batches])
    digests = [batch.digests for batch in batches if batch.digests is not None]
    return RowBatch(whole, ids, values, digests=np.concatenate(digests) if len(digests) == len(batches) else None)
