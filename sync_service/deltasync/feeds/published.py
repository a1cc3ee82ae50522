"""How much of a table was ever published, as its stamps show: a pure decision."""

from collections.abc import Set

from deltasync.core.stamps import StampedTable


def published_rows(table: StampedTable, grown_from: int, whole: Set[str]) -> int:
    """How many rows of a table were published: all, unless none of those that it has grown by was.

    Args:
        table: the table.
        grown_from: how many rows it had before it last grew; 0 if it has not.
        whole: tables of which a cut has said what rows there are: it may be that none is left.
    """
    known = table.stamps[grown_from:].any() or (not grown_from and table.spec.name in whole)
    return table.spec.rows if known else grown_from
