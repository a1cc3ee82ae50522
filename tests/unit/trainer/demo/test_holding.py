"""What is held to be looked at may be broken."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltasync.trainer.demo.holding import hold, lost_of
from deltasync.trainer.demo.processes import Processes

NAMES = ["replica-0", "replica-1", "service"]
_ENDS_BY_ITSELF = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("ready")
signal.pause()
"""
_IDLE = ["http.server", "--bind", "127.0.0.1", "0"]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Three that do nothing."""
    with Processes(tmp_path) as processes:
        for name in NAMES:
            processes.start(name, _IDLE)
        yield processes


def looks(*each: Callable[[], object]) -> Callable[[float], None]:
    """Do these between one look and the next, then press Ctrl-C."""
    left = iter(each)

    def sleep(_seconds: float) -> None:
        if (do := next(left, None)) is None:
            raise KeyboardInterrupt
        do()

    return sleep


def test_what_ends_is_said_once_and_the_rest_is_held_until_ctrl_c(processes: Processes) -> None:
    said = list[str]()
    ended = hold(
        processes, NAMES, said.append, looks(lambda: processes.kill("replica-1"), lambda: None, lambda: None)
    )
    assert said == ["replica-1 has ended (status -9)"]
    assert ended == {"replica-1"}
    assert processes.running("service")


def test_of_the_service_it_is_said_too_and_it_is_not_started_again(processes: Processes) -> None:
    said = list[str]()
    pids = [processes.pid(name) for name in NAMES]
    assert hold(processes, NAMES, said.append, looks(lambda: processes.kill("service"))) == {"service"}
    assert said == ["service has ended (status -9)"]
    assert [processes.pid(name) for name in NAMES] == pids


def test_replicas_that_left_nothing_are_named(processes: Processes) -> None:
    assert lost_of(processes, NAMES) == ""
    processes.kill("replica-1")
    assert lost_of(processes, NAMES) == "replica-1 (status -9)"


def test_what_was_halted_goes_on_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends_by_itself.py").write_text(_ENDS_BY_ITSELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("deltasync.trainer.demo.processes._STOP_SECONDS", 10.0)
    with Processes(tmp_path) as processes:
        processes.start("replica-0", ["ends_by_itself"])
        while "ready" not in processes.tail("replica-0"):
            time.sleep(0.01)
        os.kill(processes.pid("replica-0"), signal.SIGSTOP)
        processes.stop("replica-0")
        assert processes.status("replica-0") == 0
