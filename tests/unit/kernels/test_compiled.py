"""When kernels are compiled, and when what was compiled before is used."""

import errno
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from deltasync.kernels import compiled

SOURCE = """
from deltasync.kernels import types
from deltasync.kernels.compiled import kernel

@kernel(types.int64(types.int64))
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
def test_code_of_another_signature_is_not_taken_for_the_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes that save at once may leave an index that names the other's file."""
    several = tmp_path / "several.py"
    several.write_text(SOURCE.replace("@kernel(", "@kernel(types.float64(types.float64), "))
    compile_anew(several)
    first, second = sorted(tmp_path.rglob("*.nbc"))
    second.write_bytes(first.read_bytes())
    anew = compile_anew(several)
    assert (anew(21), anew(0.5)) == (42, 1.0)
    assert "has the code of another signature" in caplog.text


def test_what_was_compiled_beside_the_source_is_found_from_elsewhere(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an image was built."""
    compile_anew(file)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "own"))
    assert hits(compile_anew(file)) == 1


def test_a_full_disk_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    assert compile_anew(file)(21) == 42


def test_a_change_of_any_file_of_the_room_compiles_all_of_it_anew(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert said.endswith("set NUMBA_CACHE_DIR to an empty folder that can be written to")


def test_only_what_is_named_is_compiled(file: Path) -> None:
    compile_anew(file)
    (kernel,) = compiled._kernels
    kernel._compiled = None
    compiled.warm(compiled)
    assert kernel._compiled is None
