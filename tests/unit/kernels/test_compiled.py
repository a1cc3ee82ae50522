"""When kernels are compiled, where that is kept, and when what was compiled before is used."""

import errno
import os
import stat
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from deltasync.kernels import compiled
from deltasync.kernels.compiled import keep_in
from deltasync.log.data_directory import for_owner_only

SOURCE = """
from deltasync.kernels.compiled import float64, int64, kernel

@kernel(int64(int64))
def double(number):
    return number * 2
"""


def compile_anew(file: Path) -> Any:
    """The compiled function of the file, as another process would find it."""
    spec = spec_from_file_location("doubling", file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double.compile()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiled, "_kernels", [])
    file = tmp_path / "doubling.py"
    file.write_text(SOURCE)
    return file


def hits(function: Any) -> int:
    found: Counter[Any] = function.stats.cache_hits
    return found.total()


def test_what_was_compiled_is_kept(file: Path) -> None:
    assert hits(compile_anew(file)) == 0
    again = compile_anew(file)
    assert (hits(again), again(21)) == (1, 42)


@pytest.mark.usefixtures("file")
def test_code_of_another_signature_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two processes that save at once may leave an index that names the other's file."""
    several = tmp_path / "several.py"
    several.write_text(SOURCE.replace("@kernel(", "@kernel(float64(float64), "))
    compile_anew(several)
    first, second = sorted(tmp_path.rglob("*.nbc"))
    second.write_bytes(first.read_bytes())
    anew = compile_anew(several)
    assert (anew(21), anew(0.5)) == (42, 1.0)
    assert "has the code of another signature" in caplog.text


def test_what_lies_beside_the_source_is_found(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an image was built."""
    compile_anew(file)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "own"))
    assert hits(compile_anew(file)) == 1


def test_a_full_disk_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert compile_anew(file)(21) == 42


def test_a_change_of_any_file_compiles_all_anew(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_anew(file)
    monkeypatch.setattr(compiled, "SOURCES", "changed")
    assert hits(compile_anew(file)) == 0


def test_a_type_that_was_not_asked_for_is_an_error(file: Path) -> None:
    with pytest.raises(TypeError):
        compile_anew(file)("21")


def test_that_nothing_can_be_kept_is_said_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_a_folder(*_: Any) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(caching.CacheImpl, "__init__", without_a_folder)
    monkeypatch.setattr(compiled, "_told", set())
    for _ in range(2):
        assert compile_anew(file)(21) == 42
    (said,) = caplog.messages
    assert said.endswith("set NUMBA_CACHE_DIR to an empty, writable folder")


def test_only_what_is_named_is_compiled(file: Path) -> None:
    compile_anew(file)
    (kernel,) = compiled._kernels
    kernel._compiled = None
    compiled.warm(compiled)
    assert kernel._compiled is None


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that `NUMBA_CACHE_DIR` names."""
    folder = tmp_path / "image"
    folder.mkdir()
    (folder / "kernel").write_text("compiled")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    return folder


def test_where_it_can_be_written_it_stays(image: Path, tmp_path: Path) -> None:
    keep_in(tmp_path / "own")
    assert image / "" == Path(numba.config.CACHE_DIR)
    assert not (tmp_path / "own").exists()


def test_a_folder_that_is_made_later_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "later"))
    keep_in(tmp_path / "own")
    assert Path(numba.config.CACHE_DIR) == tmp_path / "later"


def test_what_an_image_has_is_taken_along(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    for _ in range(2):  # At every start.
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(image))
        keep_in(tmp_path / "own")
        assert Path(numba.config.CACHE_DIR) == tmp_path / "own"
        assert (tmp_path / "own" / "kernel").read_text() == "compiled"


def test_what_was_compiled_since_is_not_lost(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For another processor than the image's, say: it would be compiled at every start."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    (image / "room").mkdir()
    (image / "room" / "index").write_text("of the image")
    keep_in(tmp_path / "own")
    (tmp_path / "own" / "room" / "index").write_text("of here")
    (image / "room" / "other").write_text("of a later image")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(image))
    keep_in(tmp_path / "own")
    kept = {file.name: file.read_text() for file in (tmp_path / "own" / "room").iterdir()}
    assert kept == {"index": "of here", "other": "of a later image"}


def test_what_is_taken_along_has_the_modes_of_the_process(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service keeps it in its data directory, which is for its owner only."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    (image / "room").mkdir()
    (image / "room" / "index").touch()
    for each in (image, *image.rglob("*")):
        each.chmod(0o755)
    with for_owner_only():
        keep_in(tmp_path / "own")
    kept = [tmp_path / "own", *(tmp_path / "own").rglob("*")]
    assert [stat.filemode(each.stat().st_mode)[1:] for each in sorted(kept)] == ["rwx------", "rw-------"] * 2


def test_what_is_not_taken_along_is_compiled(image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (tmp_path / "own" / "kernel").mkdir(parents=True)
    keep_in(tmp_path / "own")
    assert Path(numba.config.CACHE_DIR) == tmp_path / "own"


def test_without_an_image_it_is_the_process_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    keep_in(tmp_path / "own")
    assert Path(numba.config.CACHE_DIR) == tmp_path / "own"
