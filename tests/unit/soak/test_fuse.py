import asyncio
import importlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.soak.fuse import (
    RANK_STEPS,
    REPLICA_STEPS,
    RESTORE_STEPS,
    SERVICE_STEPS,
    Fuse,
    blown,
    owner_of,
    slow_file,
)


class Killed(BaseException):
    pass


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Steps in the place of our own; who would be killed raises."""
    done: list[str] = []

    async def awaited() -> None:
        done.append("awaited")

    found = SimpleNamespace(called=lambda: done.append("called"), awaited=awaited, done=done)
    monkeypatch.setattr(importlib, "import_module", lambda _: found)

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGKILL)
        raise Killed

    monkeypatch.setattr(os, "kill", kill)
    return found


@pytest.mark.parametrize("places", [SERVICE_STEPS, RESTORE_STEPS, RANK_STEPS, REPLICA_STEPS])
def test_every_step_is_there_under_its_name(places: dict[str, str]) -> None:
    for place in places.values():
        owner, attribute = owner_of(place)
        assert callable(getattr(owner, attribute))


def test_nothing_happens_until_it_is_asked_for(tmp_path: Path, steps: SimpleNamespace) -> None:
    Fuse(tmp_path / "a.fuse").put_into({"x": "m:called"})
    steps.called()
    (tmp_path / "a.fuse").write_text("before y")
    steps.called()
    assert steps.done == ["called", "called"]


@pytest.mark.parametrize(("when", "done"), [("before", []), ("after", ["called"])])
def test_it_kills_once_at_the_moment_asked_for(
    tmp_path: Path, steps: SimpleNamespace, when: str, done: list[str]
) -> None:
    file = tmp_path / "a.fuse"
    Fuse(file).put_into({"x": "m:called"})
    file.write_text(f"{when} x")
    with pytest.raises(Killed):
        steps.called()
    assert steps.done == done
    assert blown(file).exists()
    steps.called()  # As in the process that is started in its place.


@pytest.mark.parametrize(("when", "done"), [("before", []), ("after", ["awaited"])])
def test_it_kills_at_what_is_awaited(tmp_path: Path, steps: SimpleNamespace, when: str, done: list[str]) -> None:
    file = tmp_path / "a.fuse"
    Fuse(file).put_into({"x": "m:awaited"})
    file.write_text(f"{when} x")
    with pytest.raises(Killed):
        asyncio.run(steps.awaited())
    assert steps.done == done


def test_only_what_writes_is_slow_and_only_while_a_file_says_so(
    tmp_path: Path, steps: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    file = tmp_path / "a.fuse"
    Fuse(file).put_into({"commit": "m:called"})
    steps.called()
    slow_file(file).write_text("0.05")
    steps.called()
    Fuse(file).put_into({"publish": "m:awaited"})
    asyncio.run(steps.awaited())
    assert (slept, steps.done) == ([0.05], ["called", "called", "awaited"])
