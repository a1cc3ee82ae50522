"""The demo's options and processes."""

import io
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deltasync.base.errors import InvalidInput
from deltasync.client import Policy
from deltasync.trainer.example.demo import checked, demo, demo_folder, run_demo
from deltasync.trainer.example.options import StreamOptions
from deltasync.trainer.example.processes import DemoFailed, Processes
from deltasync.trainer.example.run import DemoOptions

OPTIONS = DemoOptions(stream=StreamOptions(events=1000, batch_size=64))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stream": StreamOptions(data="kafka")}, "unknown data 'kafka'"),
        ({"stream": StreamOptions(data="ratings:nowhere")}, "nowhere: cannot be read"),
        ({"stream": StreamOptions(events=100, batch_size=64)}, "100 events: the demo needs at least two batches"),
        ({"ranks": 3}, "batch_size: 64, expected a multiple of the 3 ranks"),
        ({"poison_at": 0.5, "policy": Policy(top_k=0.1)}, "--poison-at: leave out --top-k and --dtype"),
        ({"poison_at": 0.5}, "--poison-at 0.5 of 1,000 events: expected at least 12,000"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        run_demo(replace(OPTIONS, **options), Console(file=io.StringIO()))


def test_every_rank_gets_equally_many_events() -> None:
    assert checked(replace(OPTIONS, ranks=32)).events == 992


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--top-k", "-1"], "top_k"),
        (["--dtype", "int8-tbe"], "'int8-tbe' is not one of"),
        (["--poison-at", "1"], "not in the range 0<x<1"),
    ],
)
def test_wrong_arguments_are_a_usage_error(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(demo, arguments)
    assert done.exit_code == 2
    assert why in done.output


@pytest.mark.parametrize(("failure", "kept"), [(KeyboardInterrupt, 0), (SystemExit, 0), (DemoFailed, 1)])
def test_logs_are_kept_after_an_error_and_not_after_an_interrupt(failure: type[BaseException], kept: int) -> None:
    text = io.StringIO()
    with pytest.raises(failure), demo_folder(Console(file=text)) as folder:
        raise failure
    assert folder.exists() == bool(kept)
    assert text.getvalue() == f"logs and results: {folder}\n" * kept
    shutil.rmtree(folder, ignore_errors=True)


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


def test_stopped_process_ends_on_request(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        started(processes, "replica-0", program, "0")
        os.kill(processes.pid("replica-0"), signal.SIGSTOP)
        processes.stop("replica-0")
        assert (processes.status("replica-0"), processes.running("replica-0")) == (0, False)


def test_error_of_a_process_has_the_end_of_its_log(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        started(processes, "replica-0", program, "3")
        with pytest.raises(DemoFailed, match="replica-0 ended with status 3; the end of its log:\nready"):
            processes.stop("replica-0")


def test_processes_end_with_the_block(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        started(processes, "replica-0", program, "0")
        assert processes.running("replica-0")
    assert processes.status("replica-0") == 0
