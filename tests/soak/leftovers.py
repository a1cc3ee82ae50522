"""What a soak leaves: files that nothing in the log of its service speaks of, and tracebacks in all logs."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.soak.fleet import CLICKS

from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions

_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(.*)", re.MULTILINE)


# What the service itself keeps beside its log and its tables.
_OWN = {"lock", "endpoints.json"}
_LOG = "log"


def tracebacks(folder: Path) -> list[str]:
    """The errors that were logged with a traceback: file, and the traceback's last line.

    Those of TorchRec's ranks are left out: one that loses another has no other way to end.
    """
    files = (file for file in sorted(folder.glob("*.log")) if not file.name.startswith(f"{CLICKS}-rank"))
    return [
        f"{file.name}: {last}" for file in files for last in _TRACEBACK.findall(file.read_text(errors="replace"))
    ]


def leftovers(data_dir: Path) -> list[str]:
    """Files, relative to the data directory, that are neither the service's own nor in a folder of a table that a
    model or a view has.
    """
    log = LmdbStore(LogOptions(directory=data_dir / _LOG))
    try:
        known = {folder for kind in ("model/", "view/") for folder in _folders(log.items(kind).values())}
    finally:
        log.close()
    files = (path.relative_to(data_dir) for path in data_dir.rglob("*") if path.is_file())
    return sorted(
        str(file) for file in files if file.parts[0] not in {*_OWN, _LOG} and not known & set(file.parts)
    )


def _folders(records: Iterable[bytes]) -> Iterator[str]:
    for record in records:
        yield from (table["folder"] for table in json.loads(record)["tables"] if "folder" in table)


def directory_bytes(folder: Path) -> int:
    """Bytes that the files in a folder take; some may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return total
