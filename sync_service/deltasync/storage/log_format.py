"""Whether a log can be read: its format, and every record that nobody else looks at when the service starts."""

from concurrent.futures import Future
from pathlib import Path

from deltasync.core.errors import StorageFailed
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import LogStore
from deltasync.storage.made_files import has_models
from deltasync.storage.records import reading

FORMAT = 1
_NAME = "format"
# Streams that their owner reads as a whole at the start, by the small record that says that there is an owner.
_READ_BY_OWNERS = {"seals": "model", "layouts": "model", "cuts": "model", "releases": "view", "heads": "view"}


def check_log(log: LogStore, models: Path) -> None:
    """Check that this version can read a log, and note in a new one which format it has.

    Raises:
        StorageFailed: a later version has written it, something in it is damaged, or it is empty although the
            folder `models` has something.
    """
    found = log.items(_NAME).get("")
    if found is None and not log.items("") and not log.streams():
        if has_models(models):
            raise StorageFailed(f"{models} has tables, but the log beside it is missing: {RESTORE}")
        log.put(_NAME, b"%d" % FORMAT).result()
        return
    with reading(f"record {_NAME}"):
        number = int(found or b"")
    if number != FORMAT:
        raise StorageFailed(
            f"the log is of format {number}, this version reads {FORMAT}: update deltasync, or give it another "
            "--data-dir"
        )
    _check_records(log)


def write_again(log: LogStore) -> Future[None]:
    """Write what the log has already: done if it takes writes. It need not be readable for that."""
    return log.put(_NAME, b"%d" % FORMAT)


def _check_records(log: LogStore) -> None:
    """Look at all small records, and at the streams of which none of them says that somebody reads them."""
    small = log.items("")
    for stream in log.streams():
        kind, _, name = stream.partition("/")
        if f"{_READ_BY_OWNERS.get(kind)}/{name}" not in small:
            for _ in log.read(stream):
                pass
