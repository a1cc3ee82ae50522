"""Whether a log can be read: its format, and every record that nobody else looks at when the service starts."""

from concurrent.futures import Future
from pathlib import Path

from deltasync.core.errors import StorageFailed
from deltasync.storage.log_store import LogStore
from deltasync.storage.records import reading

FORMAT = 1
_NAME = "data-format"
_START_EMPTY = "start with an empty --data-dir, and let the trainer publish its models"
# Streams that their owner reads as a whole at the start, by the small record that says that there is an owner.
_READ_BY_OWNERS = {"seals": "model", "layouts": "model", "cuts": "model", "releases": "view", "heads": "view"}


def check_log(log: LogStore, checkpoints: Path) -> None:
    """Check that this version can read a log, and note in a new one which format it has.

    Raises:
        StorageFailed: another version has written it, something in it is damaged, or it is empty although the
            folder `checkpoints` has something.
    """
    check_format(log)
    if not log.items(_NAME):
        if checkpoints.is_dir() and any(checkpoints.iterdir()):
            text = f"{checkpoints} has checkpoints, but the log beside it is missing"
            raise StorageFailed(f"{text}: make a data directory of them with deltasync restore; or {_START_EMPTY}")
        write_again(log).result()
        return
    _check_records(log)


def check_format(log: LogStore) -> None:
    """Check that this version can read a log; an empty one can be read.

    Raises:
        StorageFailed: another version has written it, or the record that says so is damaged.
    """
    found = log.items(_NAME).get("")
    if found is None:
        if log.items("") or log.streams():
            text = "the log was written by a version of deltasync from before data format 1, which is not read"
            raise StorageFailed(f"{text}: {_START_EMPTY}")
        return
    with reading(f"record {_NAME}"):
        number = int(found)
    if number != FORMAT:
        raise StorageFailed(
            f"the log is of format {number}, this version reads {FORMAT}: update deltasync, or give it another "
            "--data-dir"
        )


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
