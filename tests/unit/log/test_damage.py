"""A data directory that is damaged, incomplete or of a later version is refused with a sentence, never served."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support import flips
from tests.support.damage import change_key, change_value, entries, flipped

from deltasync.log.data_directory import RESTORE
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import address_of, key_of, name_of

TIMEOUT = 20
VIEW_IS_LOST = "its view cannot be"


class Written:
    """A data directory that was written before, and the keys of all that its log has."""

    def __init__(self, folder: Path) -> None:
        self._whole, self.copy = folder / "whole", folder / "copy"
        flips.write(self._whole, checkpoints=[2])
        self.keys = [(name, key) for name in ("meta", "records") for key in entries(self._whole / "log", name)]
        self.lay_out()
        self.right = started(self.copy)

    def lay_out(self) -> Path:
        """The folder of the log of a copy."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self._whole, self.copy)
        return self.copy / "log"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("damage"))


def started(folder: Path) -> dict[str, Any]:
    """Start a service; why it does not, or what it gives."""
    return flips.started(folder)


def name_in_messages(database: str, key: bytes) -> str:
    return f"record {key.decode()}" if database == "meta" else name_of(*address_of(key))


def is_of_a_view(key: bytes) -> bool:
    return key.startswith((b"releases/", b"heads/"))


def test_an_undamaged_one_starts(written: Written) -> None:
    assert written.right["position"][0] == flips.VERSIONS
    assert not [each for each in written.right["said"] if each.startswith("failed")]
    kinds = {key.split(b"/")[0] for _, key in written.keys}
    assert kinds == {
        *(b"data-format", b"consumer", b"offset", b"model", b"view"),
        *(b"cuts", b"seals", b"layouts", b"releases", b"heads"),
    }


@given(st.data(), st.integers(0, 1 << 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bit_of_any_value_is_missed(written: Written, data: st.DataObject, bit: int) -> None:
    """A service does not start without a small record. What is lost of a model comes from its trainer, and what is
    lost of a view is made anew; nothing is given that was not there.
    """
    database, key = data.draw(st.sampled_from(written.keys))
    change_value(written.lay_out(), database, key, bit)
    found, damaged = started(written.copy), f"the log's {name_in_messages(database, key)} is damaged"
    if database == "meta":
        assert damaged in found["refused"]
        assert RESTORE in found["refused"]
        return
    named = any(damaged in each for each in found["said"])
    assert found["consumers"] == written.right["consumers"]
    if is_of_a_view(key):
        assert found["position"] == written.right["position"]
        assert found["view"] == written.right["view"] or (
            named and any(VIEW_IS_LOST in each for each in found["said"])
        )
    elif found["position"] != written.right["position"]:
        assert named
    else:
        assert found["given"] == written.right["given"], "a checkpoint has what the record had"


@given(st.data(), st.integers(0, 1 << 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bit_of_any_key_is_missed(written: Written, data: st.DataObject, bit: int) -> None:
    """As if LMDB had written it so; keys out of its order are a matter of `test_lmdb_store`."""
    database, key = data.draw(st.sampled_from(written.keys))
    if (database, flipped(key, bit)) in written.keys:
        return
    change_key(written.lay_out(), database, key, bit)
    found = started(written.copy)
    if "refused" in found:
        assert RESTORE in found["refused"]
    elif any(found[each] != written.right[each] for each in ("position", "given", "view")):
        # Without an old head, a replica that holds that release is sent everything.
        assert [each for each in found["said"] if each.startswith("failed")]


def put(log: Path, name: str, value: bytes) -> None:
    store = LmdbStore(LogOptions(directory=log))
    store.put(name, value).result(TIMEOUT)
    store.close()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (b"6", "the log has format 6, this version reads 1: update deltasync, or give it another --data-dir"),
        (b"three", "the log's record data-format is invalid"),
    ],
)
def test_a_later_format_is_refused_with_both_numbers(written: Written, number: bytes, said: str) -> None:
    put(written.lay_out(), "data-format", number)
    assert said in started(written.copy)["refused"]


@pytest.mark.parametrize("record", [b"{}", b"[]", b"nothing", b"7", b'"text"', b'{"history": 1, "flushed": {}}'])
@pytest.mark.parametrize("name", ["model/clicks", "consumer/plain", "offset/plain/replica-2", "view/small"])
def test_a_record_that_says_something_else_is_named(written: Written, name: str, record: bytes) -> None:
    put(written.lay_out(), name, record)
    found = started(written.copy)
    said = found["said"] if name.startswith("view/") else [found["refused"]]
    assert any(f"the log's record {name} is invalid" in each for each in said)


@pytest.mark.parametrize("bit", [0, 43])
def test_a_format_record_whose_name_is_damaged_is_no_missing_log(written: Written, bit: int) -> None:
    key = b"data-format"
    change_key(written.lay_out(), "meta", key, bit)
    said = f"the log's record {flipped(key, bit).decode(errors='replace')} is damaged: {RESTORE}"
    assert said in started(written.copy)["refused"]


@pytest.mark.parametrize("gone", ["log", "log/data.mdb"])
@pytest.mark.parametrize("empty", [True, False])
def test_checkpoints_without_their_log_are_an_error_at_each_start(
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
        said = f"{written.copy / 'checkpoints'} has checkpoints, but the log beside it is missing"
        assert said in started(written.copy)["refused"]


def test_records_that_a_crash_left_of_a_consumer_that_is_gone_do_no_harm(written: Written) -> None:
    log = written.lay_out()
    store = LmdbStore(LogOptions(directory=log))
    store.append("releases/gone", 1, 0, 0, b"x").result(TIMEOUT)
    store.close()
    assert started(written.copy)["given"] == written.right["given"]
    log = written.lay_out()
    store = LmdbStore(LogOptions(directory=log))
    store.append("releases/gone", 1, 0, 0, b"x").result(TIMEOUT)
    store.close()
    change_value(log, "records", key_of("releases/gone", 1, 0, 0), 3)
    said = "the log's record 0 of table 0 of release 1 of consumer 'gone' is damaged"
    assert said in started(written.copy)["refused"]
