"""Which commit a package is of."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from deltasync.base import build


def git(folder: Path, *arguments: str) -> str:
    program = shutil.which("git")
    if program is None:
        pytest.skip("git is not installed")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run([program, "-C", folder, *who, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_of(monkeypatch: pytest.MonkeyPatch, said: object) -> str:
    """The commit, where pip says this of where the package came from."""
    monkeypatch.delenv("DELTASYNC_COMMIT", raising=False)
    text = None if said is None else json.dumps(said)
    monkeypatch.setattr(build, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    build.built_commit.cache_clear()
    try:
        return build.built_commit()
    finally:
        build.built_commit.cache_clear()


def test_a_checkout_that_is_used_in_place_names_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"url": tmp_path.as_uri(), "dir_info": {"editable": True}}
    assert commit_of(monkeypatch, said) == "", "no checkout"
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    git(tmp_path, "tag", "v1")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_of(monkeypatch, said) == head
    (tmp_path / "file").write_text("2")
    assert commit_of(monkeypatch, said) == f"{head}-dirty"


def test_what_was_installed_names_the_commit_that_pip_has_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        commit_of(monkeypatch, {"url": "git+https://x", "vcs_info": {"vcs": "git", "commit_id": "abc"}}) == "abc"
    )
    assert commit_of(monkeypatch, {"url": "file:///x.whl", "archive_info": {}}) == ""
    assert commit_of(monkeypatch, None) == ""


def test_the_variable_of_an_image_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTASYNC_COMMIT", "def")
    build.built_commit.cache_clear()
    assert build.built_commit() == "def"
    build.built_commit.cache_clear()
