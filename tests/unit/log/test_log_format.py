"""Which logs are read: new ones, and those of this format; others are refused, and left as they are."""

from collections.abc import Callable

import pytest
from tests.support.memory_store import MemoryDisk, MemoryStore

from deltasync.base.errors import StorageFailed
from deltasync.log.log_store import LogStore
from deltasync.log.records import FORMAT, check_log

EARLIER: list[Callable[[LogStore], object]] = [
    lambda log: log.put("format", b"1"),
    lambda log: log.append("seals/clicks", 1, 0, 0, b"{}"),
]


def test_a_new_log_is_of_this_format() -> None:
    disk = MemoryDisk()
    for _ in range(2):
        check_log(MemoryStore(disk, 1 << 20))
    assert disk.small == {"data-format": b"%d" % FORMAT}


@pytest.mark.parametrize("write", EARLIER)
def test_a_log_of_an_earlier_version_is_refused_and_left_alone(
    write: Callable[[LogStore], object],
) -> None:
    disk = MemoryDisk()
    log = MemoryStore(disk, 1 << 20)
    write(log)
    before = repr(disk)
    with pytest.raises(StorageFailed) as refused:
        check_log(log)
    assert str(refused.value) == (
        "an older version of deltasync wrote the log in a format that this version cannot read: "
        "start with an empty --data-dir, and let the trainer publish its models"
    )
    assert repr(disk) == before
