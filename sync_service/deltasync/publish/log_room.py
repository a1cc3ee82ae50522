"""Whether a cut has room in the log at all, however empty that is. Pure decisions, each with its reason."""

from collections.abc import Iterable

from deltasync.core.position import Decision
from deltasync.core.tables import DIGEST_TYPE, TableSpec

_MIB = 1 << 20
# A cut that a log refuses as full, though room was made for it so often, has none.
MOST_TRIES = 3


class Tries:
    """How often the full log has refused one cut, though room was made for it each time."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._tries = 0
        self._room = False

    def note_room(self) -> None:
        """Note that the log has as much room as can be made."""
        self._room = True

    def count(self, step: int, log_bytes: int, capacity: int) -> int:
        """Count one of the cut of a step, of which so many bytes have arrived: how many there were of it.

        A small one is refused for what others have in the log, and will find room.
        """
        large = log_bytes > capacity // 4
        self._tries = self._tries + 1 if self._room and step == self._step and large else 0
        self._step, self._room = step, False
        return self._tries


def whole_bytes(tables: Iterable[TableSpec]) -> int:
    """What all rows of some tables take in the log, bytes: ids, values and digests."""
    return sum(table.rows * (table.row_bytes + DIGEST_TYPE.itemsize) for table in tables)


def first_cut_fits(tables: Iterable[TableSpec], capacity: int) -> Decision:
    """Whether the first cut of a model, which has every row of its tables, fits a log.

    Args:
        tables: of the model.
        capacity: bytes of rows that the log takes.
    """
    needed = whole_bytes(tables)
    if needed <= capacity:
        return Decision(True, f"every row takes {needed} bytes of a log that has room for {capacity}")
    return Decision(False, f"every row of its tables takes {needed} bytes in the log, {_room(capacity, needed)}")


def cut_fits(step: int, log_bytes: int, capacity: int, tables: Iterable[TableSpec], tries: int = 0) -> Decision:
    """Whether a cut that is arriving fits a log.

    Args:
        step: of the cut.
        log_bytes: what has arrived of it takes in the log, or more with what the log adds.
        capacity: bytes of rows that the log takes.
        tables: of its run, of which it may have every row.
        tries: how often the log was too full for it since room was made for all that can be.
    """
    if log_bytes <= capacity and tries < MOST_TRIES:
        return Decision(True, f"{log_bytes} bytes of a log that has room for {capacity}")
    said = f"what has arrived of the cut of step {step} takes {log_bytes} bytes in the log"
    return Decision(False, f"{said}, {_room(capacity, max(log_bytes, whole_bytes(tables)))}")


def enough(needed: int) -> int:
    """A value of `--log-max-bytes` with which a cut of so many bytes, in chunks that are not small, has room."""
    return -(-(needed * 6 // 5 + _MIB) // _MIB) * _MIB


def _room(capacity: int, needed: int) -> str:
    return (
        f"which has room for {capacity}: restart the service with --log-max-bytes {enough(needed)} or more, if "
        "its volume has room for that beside the tables"
    )
