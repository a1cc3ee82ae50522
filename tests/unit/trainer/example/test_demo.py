"""The demo's processes, options that do not fit, and folders that it leaves."""

import io
import os
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deltasync.base.errors import InvalidInput
from deltasync.client import Policy, ValueType
from deltasync.trainer.example.demo import DemoOptions, checked, demo, run_demo
from deltasync.trainer.example.options import ModelOptions, StreamOptions, TrainingOptions
from deltasync.trainer.example.processes import DemoFailed, Processes

OPTIONS = DemoOptions(stream=StreamOptions(events=1000, batch_size=64))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary ones."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stream": StreamOptions(data="kafka")}, "unknown data 'kafka'"),
        ({"stream": StreamOptions(data="ratings:nowhere")}, "nowhere: cannot be read"),
        ({"stream": StreamOptions(events=100, batch_size=64)}, "100 events: the demo needs at least two batches"),
        ({"training": TrainingOptions(grad_accum=3)}, "a multiple of 6, for 2 ranks with 3 micro-batches each"),
        (
            {"sizes": ModelOptions(managed=True), "training": TrainingOptions(input="tensordict")},
            "managed collision takes KeyedJaggedTensors only",
        ),
        ({"poison_at": 0.5, "policy": Policy(top_k=0.1)}, "--poison-at: leave out --serve, --top-k and --dtype"),
        ({"poison_at": 0.5}, "--poison-at 0.5 of 1,000 events: at least 12,000 must come before"),
    ],
)
def test_what_cannot_be_run_leaves_nothing(temporary: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        run_demo(replace(OPTIONS, **options), Console(file=io.StringIO()))
    assert not list(temporary.iterdir())


def test_every_rank_has_equally_many_events() -> None:
    assert checked(replace(OPTIONS, ranks=32)).stream.events == 992


def test_predictors_are_two_fleets_of_which_one_is_frozen() -> None:
    assert [(fleet.serves, fleet.frozen, fleet.replicas) for fleet in OPTIONS.fleets] == [
        (False, False, ("replica-0", "replica-1"))
    ]
    served = replace(OPTIONS, policy=Policy(value_type=ValueType.INT8_TBE))
    assert [(fleet.serves, fleet.frozen, fleet.replicas) for fleet in served.fleets] == [
        (True, False, ("replica-0",)),
        (True, True, ("replica-1",)),
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--json", "nowhere/report.json"], "there is no folder nowhere"),
        (["--top-k", "-1"], "top_k"),
        (["--model", "x"], "'x' is not one of"),
        (["--serve", "int2"], "'int2' is not one of"),
        (["--serve", "int8", "--dtype", "fp16"], "leave out --dtype, or use --dtype int8-tbe"),
        (["--serve", "shared", "--model", "mch"], "--serve shared serves rows as they are trained"),
        (["--kill-service-at", "0.5"], "No such option"),
        (["--plot", "auc.png"], "--plot needs --poison-at"),
        (["--plot", "nowhere/auc.png", "--poison-at", "0.5"], "there is no folder nowhere"),
        (["--poison-at", "1"], "not in the range 0<x<1"),
    ],
)
def test_a_wrong_use_leaves_nothing(temporary: Path, arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(demo, arguments)
    assert done.exit_code == 2
    assert why in done.output
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("failure", "left"), [(KeyboardInterrupt, 0), (SystemExit, 0), (DemoFailed, 1), (OSError, 1)]
)
def test_logs_are_kept_and_named_after_a_failure_and_not_after_an_interrupt(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException], left: int
) -> None:
    def fails(*_: object) -> None:
        assert list(temporary.iterdir())
        raise failure

    monkeypatch.setattr(Processes, "start", fails)
    said = io.StringIO()
    with pytest.raises(failure):
        run_demo(OPTIONS, Console(file=said, width=200))
    folders = list(temporary.iterdir())
    assert len(folders) == left
    named = "".join(f"logs and results: {folder}\n" for folder in folders)
    waiting = "starting the service; the first time, compiling its kernels takes half a minute or more\n"
    assert said.getvalue() == waiting + named


# The demo's processes.

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
