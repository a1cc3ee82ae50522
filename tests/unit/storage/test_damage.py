"""A data directory that is damaged, incomplete or of a later version is refused with a sentence, never served."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import flips
from tests.support.damage import change_key, change_value, entries, flipped
from tests.support.local_service import run

from deltasync.core.errors import StorageFailed
from deltasync.service.service import Service
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.lmdb_records import address_of, key_of
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions
from deltasync.storage.records import name_of

TIMEOUT = 20
VIEW_IS_LOST = "its view cannot be read, so its replicas get every row"


class Written:
    """A data directory that was written before, and the keys of all that its log has."""

    def __init__(self, folder: Path) -> None:
        self._whole, self.copy = folder / "whole", folder / "copy"
        flips.write(self._whole, flushed=False)
        self.keys = [(name, key) for name in ("meta", "records") for key in entries(self._whole / "log", name)]

    def lay_out(self) -> Path:
        """The folder of the log of a copy."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self._whole, self.copy)
        return self.copy / "log"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("damage"))


async def nothing(service: Service) -> None:
    pass


def started(folder: Path) -> str:
    """Start a service; why it does not."""
    failed: list[BaseException] = []
    try:
        run(folder, nothing)
    except* StorageFailed as group:
        failed.append(group)
    while failed and isinstance(failed[0], BaseExceptionGroup):
        failed = list(failed[0].exceptions)
    return str(failed[0]) if failed else ""


def name_in_messages(database: str, key: bytes) -> str:
    return f"record {key.decode()}" if database == "meta" else name_of(*address_of(key))


def is_of_a_view(database: str, key: bytes) -> bool:
    return database == "records" and key.startswith((b"releases/", b"heads/"))


def test_an_undamaged_one_starts(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    written.lay_out()
    assert not started(written.copy)
    assert VIEW_IS_LOST not in caplog.text
    kinds = {key.split(b"/")[0] for _, key in written.keys}
    assert kinds == {
        *(b"format", b"consumer", b"offset", b"model", b"view", b"release"),
        *(b"cuts", b"seals", b"layouts", b"releases", b"heads"),
    }


@given(st.data(), st.integers(0, 1 << 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bit_of_any_value_is_missed(
    written: Written, caplog: pytest.LogCaptureFixture, data: st.DataObject, bit: int
) -> None:
    database, key = data.draw(st.sampled_from(written.keys))
    caplog.clear()
    change_value(written.lay_out(), database, key, bit)
    said = started(written.copy)
    if is_of_a_view(database, key):
        said = next(line for line in caplog.text.splitlines() if VIEW_IS_LOST in line)
    assert f"the log's {name_in_messages(database, key)} is damaged" in said
    assert (RESTORE in said) is not is_of_a_view(database, key), "a view is made anew without that"


@given(st.data(), st.integers(0, 1 << 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bit_of_any_key_is_missed(
    written: Written, caplog: pytest.LogCaptureFixture, data: st.DataObject, bit: int
) -> None:
    """As if LMDB had written it so; keys out of its order are a matter of `test_lmdb_store`."""
    database, key = data.draw(st.sampled_from(written.keys))
    caplog.clear()
    if (database, flipped(key, bit)) in written.keys:
        return
    change_key(written.lay_out(), database, key, bit)
    said = started(written.copy)
    if is_of_a_view(database, key) and not said:
        # Without an old head, a replica that holds that release is sent everything.
        assert VIEW_IS_LOST in caplog.text or key.startswith(b"heads/")
        return
    assert RESTORE in said


def put(log: Path, name: str, value: bytes) -> None:
    store = LmdbStore(LogOptions(directory=log))
    store.put(name, value).result(TIMEOUT)
    store.close()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (b"6", "the log is of format 6, this version reads 1: update deltasync, or give it another --data-dir"),
        (b"three", "the log's record format cannot be understood"),
    ],
)
def test_a_later_format_is_refused_with_both_numbers(written: Written, number: bytes, said: str) -> None:
    put(written.lay_out(), "format", number)
    assert said in started(written.copy)


@pytest.mark.parametrize("record", [b"{}", b"[]", b"nothing", b"7", b'"text"', b'{"history": 1, "flushed": {}}'])
@pytest.mark.parametrize(
    "name", ["model/clicks", "consumer/plain", "offset/plain/replica-2", "view/small", "release/small"]
)
def test_a_record_that_says_something_else_is_named(
    written: Written, caplog: pytest.LogCaptureFixture, name: str, record: bytes
) -> None:
    put(written.lay_out(), name, record)
    said = started(written.copy) or caplog.text
    assert f"the log's record {name} cannot be understood" in said
    assert name.startswith(("view/", "release/")) or said != caplog.text


@pytest.mark.parametrize("gone", ["log", "log/data.mdb"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_log_that_is_gone_from_beside_its_models_is_missed_each_time(
    written: Written, gone: str, empty: bool
) -> None:
    """Else the service would forget all consumers."""
    written.lay_out()
    if gone == "log":
        shutil.rmtree(written.copy / gone)
    else:
        (written.copy / gone).unlink()
        if empty:
            (written.copy / gone).touch()
    for _ in range(2):
        assert f"{written.copy / 'models'} has tables, but the log beside it is missing" in started(written.copy)


def test_records_that_a_crash_left_of_a_consumer_that_is_gone_do_no_harm(written: Written) -> None:
    log = written.lay_out()
    store = LmdbStore(LogOptions(directory=log))
    store.append("releases/gone", 1, 0, 0, b"x").result(TIMEOUT)
    store.close()
    assert not started(written.copy)
    log = written.lay_out()
    store = LmdbStore(LogOptions(directory=log))
    store.append("releases/gone", 1, 0, 0, b"x").result(TIMEOUT)
    store.close()
    change_value(log, "records", key_of("releases/gone", 1, 0, 0), 3)
    assert "the log's record 0 of table 0 of release 1 of consumer 'gone' is damaged" in started(written.copy)
