"""What becomes of a model's tables when a run announces its own. Pure functions."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from deltasync.core.errors import Contradiction
from deltasync.core.tables import TableKind, TableSpec

# What those who know of no kinds publish as embedding tables.
_DENSE = (TableKind.PARAMETER, TableKind.BUFFER)


def changes(
    model: str, known: Mapping[str, TableSpec], announced: Iterable[TableSpec], *, later_run: bool
) -> list[TableSpec]:
    """The tables that are new, or are to be something else than they are, as they are to be.

    In a later run a table may have more rows. One that is known as an embedding table, since a trainer that knew
    of no kinds has published it, may turn out to be a parameter or a buffer, and stays that when such a trainer
    publishes it again.

    Args:
        model: the model's name.
        known: its tables, by name.
        announced: those that a run has.
        later_run: whether it is another run than the one that published last; all ranks of a run have the same.

    Raises:
        Contradiction: a table has fewer rows than it had, or is otherwise something else.
    """
    wanted = [_wanted(model, known.get(table.name), table, later_run=later_run) for table in announced]
    return [table for table in wanted if table != known.get(table.name)]


def _wanted(model: str, known: TableSpec | None, announced: TableSpec, *, later_run: bool) -> TableSpec:
    """What a table is to be."""
    if known is None or known == announced:
        return announced
    kind = _kind(known.kind, announced.kind)
    if kind and (known.rows == announced.rows or (later_run and known.rows < announced.rows)):
        wanted = replace(announced, kind=kind)
        if wanted == replace(known, rows=announced.rows, kind=kind):
            return wanted
    raise Contradiction(
        f"table {announced.name!r} of model {model!r} is {_words(known, announced)}, the run has "
        f"{_words(announced, known)}: a table can get more rows in a later run, and change in nothing else; "
        "publish it under another model (SyncOptions(model=...), --model NAME), or under another table name"
    )


def _kind(known: TableKind, announced: TableKind) -> TableKind | None:
    """What a table holds that is known and announced as these; None if it cannot be both."""
    if TableKind.EMBEDDING in (known, announced):
        other = announced if known is TableKind.EMBEDDING else known
        return other if other in (TableKind.EMBEDDING, *_DENSE) else None
    return known if known is announced else None


def _words(table: TableSpec, other: TableSpec) -> str:
    """A table's shape and type, and its kind where the other has another."""
    kind = f"{table.kind.value} " if table.kind is not other.kind else ""
    of = f" of {table.of!r}" if table.of != other.of else ""
    return f"{kind}{table.rows} x {table.dim} {table.dtype}{of}"
