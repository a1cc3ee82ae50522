"""What becomes of a model's tables when a run announces its own. Pure functions."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from deltasync.core.errors import Contradiction
from deltasync.core.tables import TableSpec


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
