"""Files of compiled code that are not as they were written."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels.code_cache import _Files

KEYS = ("first", "second")
CODE = {key: (key, bytes(range(256))) for key in KEYS}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The names of the files, and what they hold."""
    folder = tmp_path_factory.mktemp("written")
    for key in KEYS:
        files(folder).save(key, CODE[key])
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def files(folder: Path) -> _Files:
    return _Files(str(folder), "function", "stamp")


def restored(folder: Path, written: dict[str, bytes]) -> Path:
    for name, content in written.items():
        (folder / name).write_bytes(content)
    return folder


def damaged(content: bytes, how: str, at: int) -> bytes:
    at %= len(content)
    match how:
        case "cut off":
            return content[:at]
        case "zeros from there on":
            return content[:at] + bytes(len(content) - at)
        case "one bit":
            return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
    raise AssertionError


def test_what_was_saved_is_found(written: dict[str, bytes], tmp_path: Path) -> None:
    kept = files(restored(tmp_path, written))
    assert {key: kept.load(key) for key in KEYS} == CODE
    assert kept.load("third") is None


@given(st.sampled_from(["cut off", "zeros from there on", "one bit"]), st.integers(0, 1000), st.data())
def test_nothing_is_found_that_was_not_saved(
    written: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, how: str, at: int, data: st.DataObject
) -> None:
    """Whatever has happened to a file: what is found is right, and what is saved afterwards is found."""
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    restored(folder, written)
    name = data.draw(st.sampled_from(sorted(written)))
    (folder / name).write_bytes(damaged(written[name], how, at))
    for key in KEYS:
        assert files(folder).load(key) in (None, CODE[key])
        files(folder).save(key, CODE[key])
        assert files(folder).load(key) == CODE[key]


def test_a_file_that_has_become_another_keys_is_not_taken_for_the_own(
    written: dict[str, bytes], tmp_path: Path
) -> None:
    """Two processes that save different keys at once may choose the same name."""
    first, second = sorted(name for name in written if name.endswith(".nbc"))
    restored(tmp_path, written | {first: written[second]})
    assert (files(tmp_path).load("first"), files(tmp_path).load("second")) == (None, CODE["second"])
