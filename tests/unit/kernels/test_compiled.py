"""When kernels are compiled, where the compiled code is cached, and when it is used again."""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

from deltasync.kernels import compiled
from deltasync.kernels.compiled import keep_in
from deltasync.kernels.instructions import fence
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
def file(tmp_path: Path) -> Iterator[Path]:
    """A source file, whose kernels are forgotten afterwards."""
    kernels = len(compiled._kernels)
    file = tmp_path / "doubling.py"
    file.write_text(SOURCE)
    yield file
    del compiled._kernels[kernels:]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """numba's cache folder."""
    before, folder = numba.config.CACHE_DIR, tmp_path / "cache"
    numba.config.CACHE_DIR = str(folder)
    yield folder
    numba.config.CACHE_DIR = before


def hits(function: Any) -> int:
    found: Counter[Any] = function.stats.cache_hits
    return found.total()


def test_compiled_code_is_cached(file: Path) -> None:
    assert hits(compile_anew(file)) == 0
    again = compile_anew(file)
    assert (hits(again), again(21)) == (1, 42)
    with pytest.raises(TypeError):
        again("21")


@pytest.mark.usefixtures("file")
def test_code_of_another_signature_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two processes that save at once may leave an index that names the other's file."""
    several = tmp_path / "several.py"
    several.write_text(SOURCE.replace("@kernel(", "@kernel(float64(float64), "))
    compile_anew(several)
    first, second = sorted(tmp_path.rglob("*.nbc"))
    second.write_bytes(first.read_bytes())
    anew = compile_anew(several)
    assert (anew(21), anew(0.5)) == (42, 1.0)
    assert "has the code of another signature" in caplog.text


def test_code_compiled_beside_the_source_is_used(file: Path, request: pytest.FixtureRequest) -> None:
    """As in an image, whose files a service copies for its owner only."""
    compile_anew(file)
    cache = request.getfixturevalue("cache")
    with for_owner_only():
        assert hits(compile_anew(file)) == 1
    assert {stat.filemode(each.stat().st_mode) for each in cache.rglob("*.nb?")} == {"-rw-------"}


def test_a_change_of_any_source_invalidates_the_cache(tmp_path: Path) -> None:
    for name in ("one.py", "other.py"):
        (tmp_path / name).write_text("")
    before = compiled._stamp(tmp_path)
    (tmp_path / "other.py").write_text("changed")
    assert compiled._stamp(tmp_path) != before
    assert fence.function.__qualname__.endswith(compiled.SOURCES)


def test_a_cache_that_cannot_be_written_causes_one_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_a_folder(*_: Any) -> None:
        raise RuntimeError("no locator available")

    compiled._told.clear()
    monkeypatch.setattr(caching.CacheImpl, "__init__", without_a_folder)
    for _ in range(2):
        assert compile_anew(file)(21) == 42
    (warning,) = caplog.messages
    assert warning.endswith("set NUMBA_CACHE_DIR to an empty, writable folder")


def test_warming_compiles_only_the_named_modules(file: Path) -> None:
    compile_anew(file)
    *_, kernel = compiled._kernels
    kernel._compiled = None
    compiled.warm(compiled)
    assert kernel._compiled is None


def test_a_configured_cache_stays_where_it_is(cache: Path, tmp_path: Path) -> None:
    keep_in(tmp_path / "own")
    assert Path(numba.config.CACHE_DIR) == cache


@pytest.mark.parametrize("writable", [True, False])
def test_a_process_uses_its_own_cache_if_the_package_is_read_only(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    numba.config.CACHE_DIR = ""
    monkeypatch.setattr(os, "access", lambda *_: writable)
    keep_in(tmp_path / "own")
    assert ("" if writable else str(tmp_path / "own")) == numba.config.CACHE_DIR


def test_a_fence_is_compiled_and_orders_everything() -> None:
    fence()
    again = numba.njit(fence.function)
    again()
    [code] = again.inspect_llvm().values()
    assert "fence seq_cst" in code
