"""Processes that are started again when they were killed."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.soak.crew import Crew
from tests.support.waiting import wait_for

from deltasync.trainer.example.processes import Processes

FOR_EVER = ["http.server", "--bind", "127.0.0.1", "0"]
AT_ONCE = ["json.tool", "--help"]
WITH_AN_ERROR = ["json.tool", "/nowhere"]


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with Processes(tmp_path) as processes:
        yield Crew(processes)


def supervised_until(crew: Crew, done: Callable[[], bool]) -> None:
    def supervised() -> bool:
        crew.supervise()
        return done()

    wait_for(supervised, seconds=60)


def test_what_ends_by_itself_with_an_error_is_a_trouble(crew: Crew) -> None:
    crew.start("a", WITH_AN_ERROR)
    supervised_until(crew, lambda: bool(crew.troubles))
    assert "a ended with status" in crew.troubles[0]
    assert "nowhere" in crew.troubles[0]


def test_what_is_dismissed_stays_away_though_it_was_frozen(crew: Crew) -> None:
    crew.start("a", FOR_EVER)
    crew.send("a", signal.SIGSTOP)
    crew.dismiss(["a"])
    crew.supervise()
    assert (crew.names(), crew.starts["a"], crew.troubles) == ([], 1, [])


def test_a_restart_has_nobody_start_it_meanwhile(crew: Crew) -> None:
    crew.start("a", FOR_EVER)
    seen: list[int] = []

    def between() -> None:
        crew.supervise()
        seen.append(crew.starts["a"])

    crew.restart("a", between=between)
    assert (seen, crew.starts["a"], crew.runs("a")) == ([1], 2, True)


def test_of_a_team_all_are_started_again(crew: Crew) -> None:
    def start() -> None:
        for name in ("rank-0", "rank-1"):
            crew.start(name, FOR_EVER)

    crew.start_team("rank", start)
    other = crew.pid("rank-1")
    crew.kill(["rank-0"])
    supervised_until(crew, lambda: crew.starts["rank-1"] == 2)
    assert crew.starts["rank-0"] == 2
    assert crew.pid("rank-1") != other
    assert not crew.troubles


def test_two_processes_restart_with_new_programs_without_waiting(crew: Crew) -> None:
    crew.start("a", AT_ONCE)
    crew.start("b", FOR_EVER)
    crew.restart("a", between=lambda: crew.restart("b"), command=FOR_EVER)
    supervised_until(crew, lambda: crew.runs("a") and crew.runs("b"))
    assert (crew.starts["a"], crew.starts["b"], crew.troubles) == (2, 2, [])
    crew.dismiss(["b"])
    with pytest.raises(KeyError):
        crew.restart("b")


def test_once_it_is_closed_nothing_is_started(crew: Crew) -> None:
    crew.start("a", FOR_EVER)
    crew.close()
    crew.kill(["a"])
    crew.wait("a")
    crew.supervise()
    assert (crew.starts["a"], crew.runs("a")) == (1, False)
