"""Where compiled kernels are kept."""

import os
from pathlib import Path

import numba
import pytest

from deltasync.kernels.compiled import keep_in


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


def test_where_it_cannot_what_an_image_has_compiled_is_taken_along(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_cannot_be_taken_along_is_compiled_again(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (tmp_path / "own" / "kernel").mkdir(parents=True)
    keep_in(tmp_path / "own")
    assert Path(numba.config.CACHE_DIR) == tmp_path / "own"


def test_without_a_folder_of_an_image_it_is_the_process_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    keep_in(tmp_path / "own")
    assert Path(numba.config.CACHE_DIR) == tmp_path / "own"
