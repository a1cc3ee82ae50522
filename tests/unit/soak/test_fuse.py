import asyncio
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

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
    """Steps of a module `m`."""
    done: list[str] = []

    async def awaited() -> None:
        done.append("awaited")

    found = SimpleNamespace(called=lambda: done.append("called"), awaited=awaited, done=done)
    monkeypatch.setitem(sys.modules, "m", cast("ModuleType", found))
    return found


def kill(pid: int, number: int) -> None:
    assert (pid, number) == (os.getpid(), signal.SIGKILL)
    raise Killed


@pytest.mark.parametrize("places", [SERVICE_STEPS, RESTORE_STEPS, RANK_STEPS, REPLICA_STEPS])
def test_every_step_is_there_under_its_name(places: dict[str, str]) -> None:
    for place in places.values():
        owner, attribute = owner_of(place)
        assert callable(getattr(owner, attribute))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["called", "awaited"])
def test_it_kills_once_at_the_moment_asked_for_and_not_before(
    tmp_path: Path, steps: SimpleNamespace, step: str, when: str
) -> None:
    def do() -> None:
        if step == "called":
            steps.called()
        else:
            asyncio.run(steps.awaited())

    file = tmp_path / "a.fuse"
    Fuse(file, kill).put_into({"x": f"m:{step}"})
    do()
    file.write_text(f"{when} y")
    do()
    file.write_text(f"{when} x")
    with pytest.raises(Killed):
        do()
    assert steps.done == [step] * (2 + (when == "after"))
    assert blown(file).exists()
    do()  # As in the process that is started in its place.


def test_only_what_writes_is_slow_and_only_while_a_file_says_so(tmp_path: Path, steps: SimpleNamespace) -> None:
    slept: list[float] = []
    file = tmp_path / "a.fuse"
    Fuse(file, sleep=slept.append).put_into({"commit": "m:called"})
    steps.called()
    slow_file(file).write_text("0.05")
    steps.called()
    Fuse(file, sleep=slept.append).put_into({"publish": "m:awaited"})
    asyncio.run(steps.awaited())
    assert (slept, steps.done) == ([0.05], ["called", "called", "awaited"])
