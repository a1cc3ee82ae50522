"""The demo's processes."""

import os
import signal
import time
from pathlib import Path

import pytest

from deltasync.trainer.example.processes import DemoFailed, Processes

_ENDS_BY_ITSELF = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
print("ready")
signal.pause()
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that ends on SIGTERM with the status in its argument."""
    (tmp_path / "ends_by_itself.py").write_text(_ENDS_BY_ITSELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "ends_by_itself"


def started(processes: Processes, name: str, *arguments: str) -> None:
    processes.start(name, arguments)
    while "ready" not in processes.tail(name):
        time.sleep(0.01)


def test_what_was_halted_goes_on_to_its_end(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        started(processes, "replica-0", program, "0")
        os.kill(processes.pid("replica-0"), signal.SIGSTOP)
        processes.stop("replica-0")
        assert (processes.status("replica-0"), processes.running("replica-0")) == (0, False)


def test_a_process_that_fails_shows_the_end_of_its_log(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        started(processes, "replica-0", program, "3")
        with pytest.raises(DemoFailed, match="replica-0 ended with status 3; the end of its log:\nready"):
            processes.stop("replica-0")


def test_processes_end_with_the_block(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        started(processes, "replica-0", program, "0")
        assert processes.running("replica-0")
    assert processes.status("replica-0") == 0
