"""The process: which commit it runs, and freed memory that is returned to the system."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.programs import run_program

from deltasync.base import process


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
    monkeypatch.setattr(process, "distribution", lambda _: SimpleNamespace(read_text=lambda _: text))
    process.built_commit.cache_clear()
    try:
        return process.built_commit()
    finally:
        process.built_commit.cache_clear()


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
    process.built_commit.cache_clear()
    assert process.built_commit() == "def"
    process.built_commit.cache_clear()


_PROGRAM = """
import sys
from pathlib import Path
from deltasync.base.process import FreedMemory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

assert keep_freed_memory()
freed = FreedMemory(50_000_000)
assert not freed.give_back()
for _ in range(2):
    blocks = [b"x" * (30_000 + number % 2) for number in range(10_000)]
    kept = blocks[::50]
    del blocks
    assert resident() > 250_000_000
    assert freed.give_back()
    assert resident() < 150_000_000
    assert not freed.give_back()  # It is returned already.
    del kept
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc tells what it keeps")
def test_what_is_too_much_is_returned_once() -> None:
    done = run_program(sys.executable, "-c", _PROGRAM)
    assert done.returncode == 0, done.stderr
