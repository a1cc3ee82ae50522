"""The layout of tables in shared memory, version 2. `deltasync_shared.h` has the same in C.

A mirror NAME is a folder `DIRECTORY/deltasync-NAME` with these files. All numbers are little-endian and aligned.

control     the header, and a description of each of the two sides with its tables. Only the mirror writes it.
writer      empty; the mirror locks it
readers     one entry for each thread that reads a whole version. Readers write it.
HEX         an array of a table on one side: its rows, the mask of existing rows, or its index of raw ids

The mirror writes a release into the side that is not served, serves it, and then writes the other side. A side
has a sequence number that is odd while the side is written. To copy rows, read `served`, the sequence number of
that side, the rows, and the sequence number again. If it is odd or has changed, the rows may be torn: start again.

To use a whole version for longer, pin its side with an entry in `readers`, and then read `served` again. The
mirror waits before it writes a pinned side, but no longer than its limit. So compare the sequence number after
use as well. After the limit the mirror ignores the entry until it has seen it without a pin.

The header has the next file number, because no number is used twice. An array's file never changes its size. If a
file is missing, the side has changed meanwhile. Every reader may change `readers`, also its size: do not map it.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.position import Position
from deltasync.core.table_form import ReplicaSpec
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType

MAGIC = b"DELTASHM"
VERSION = 2
CONTROL, WRITER, READERS = "control", "writer", "readers"

# Bytes of the header, and of each side with its tables.
HEADER_BYTES = 4096
MOST_TABLES = 1024
NAME_BYTES = 512

# The mirror writes `alive_ns` about every second, by CLOCK_BOOTTIME, which all containers of a host share. It is 0
# once the mirror has stopped.
HEADER = np.dtype(
    {
        "names": [
            "magic",
            "layout",
            "served",
            "alive_ns",
            "state_sequence",
            "ready",
            "next_file",
            "model",
            "consumer",
            "reason",
        ],
        "formats": [
            "S8",
            "<u4",
            "<u8",
            "<i8",
            "<u8",
            "<u8",
            "<u8",
            "S512",
            "S512",
            "S1024",
        ],
        "offsets": [0, 8, 64, 72, 80, 88, 96, 128, 640, 1152],
        "itemsize": HEADER_BYTES,
    }
)
SIDE = np.dtype(
    {
        "names": [
            "sequence",
            "tables",
            "version",
            "step",
            "step_end_unix_ns",
            "event_time_unix_ns",
            "number",
            "seal",
            "history",
            "kept",
        ],
        "formats": ["<u8", "<u8", "<u8", "<i8", "<i8", "<i8", "<u8", "<u8", "S128", "S512"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56, 64, 192],
        "itemsize": 1024,
    }
)
# `dtype` is NumPy's, for example `<f4`. `value_type` is the number of a `ValueType` if rows are held encoded, with
# `table_dim` values in each; else 0. `there` and `index` are files: a byte for each row that says whether it
# exists, and an index of raw ids (see `kernels/keys.py`): `index_slots` pairs of int64, a raw id and its row, and
# then the salt of two int64; 0 without a map of raw ids. `of` is the name of the table to which a map belongs.
TABLE = np.dtype(
    {
        "names": [
            "name",
            "of",
            "kind",
            "dtype",
            "dim",
            "row_bytes",
            "rows",
            "file",
            "there",
            "index",
            "index_slots",
            "value_type",
            "table_dim",
        ],
        "formats": ["S512", "S512", "<u4", "S8", "<u4", "<u4", "<u8", "<u8", "<u8", "<u8", "<u8", "<u4", "<u4"],
        "offsets": [0, 512, 1024, 1032, 1040, 1044, 1048, 1056, 1064, 1072, 1080, 1088, 1092],
        "itemsize": 1152,
    }
)
FILES = "file", "there", "index"  # The fields of TABLE that name files.
SIDE_BYTES = SIDE.itemsize + MOST_TABLES * TABLE.itemsize
CONTROL_BYTES = HEADER_BYTES + 2 * SIDE_BYTES

# A thread owns an entry while it has a lock on its byte in `readers`: an open file description lock, which ends
# with the process. `side` is 0, or 1 + the pinned side; `pid` tells one reader from the next.
READER = np.dtype(
    {
        "names": ["side", "pid"],
        "formats": ["<u8", "<u8"],
        "offsets": [0, 8],
        "itemsize": 64,
    }
)
MOST_READERS = 1024
READERS_BYTES = MOST_READERS * READER.itemsize
DIRECTORY = Path("/dev/shm")  # noqa: S108  # the shared memory of the host


def folder_of(name: str, directory: Path = DIRECTORY) -> Path:
    """The folder of a mirror."""
    return directory / f"deltasync-{name}"


def file_name(number: int) -> str:
    """The name of the file of an array."""
    return f"{number:x}"


def side_offset(side: int) -> int:
    """Where a side begins in `control`."""
    return HEADER_BYTES + side * SIDE_BYTES


def spec_of(described: Any) -> TableSpec:
    """The table that a description describes.

    Raises:
        ValueError: the description is damaged.
    """
    try:
        name, rows, dim = described["name"].decode(), int(described["rows"]), int(described["dim"])
        dtype, kind = np.dtype(described["dtype"].decode()), TableKind.of_number(int(described["kind"]))
        if (slots := int(described["index_slots"])) & (slots - 1):
            raise ValueError(f"table {name!r} has an index of {slots} slots")
        if (value_type := ValueType.of_number(int(described["value_type"]))) is not None:
            table_dim = int(described["table_dim"])
            return ReplicaSpec(name, rows, dim, dtype, value_type=value_type, table_dim=table_dim)
        if kind is None:
            raise ValueError(f"table {name!r} is of kind {described['kind']}")
        return TableSpec(name, rows, dim, dtype, kind, described["of"].decode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"its description of a table is damaged: {error}") from error


def reading_of(side: NDArray[Any]) -> dict[str, Any]:
    """The fields of `Reading` in the description [1] of a side that has a version.

    Raises:
        ValueError: the description is damaged.
    """
    shown = side[0]
    return {
        "position": Position(shown["history"].decode(), int(shown["number"]), int(shown["seal"])),
        "version": int(shown["version"]),
        "step": int(shown["step"]),
        "step_end_unix_ns": int(shown["step_end_unix_ns"]),
        "event_time_unix_ns": int(shown["event_time_unix_ns"]) or None,
        "kept": shown["kept"].decode(),
    }
