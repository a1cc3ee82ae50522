"""What the demo does before its first process, and what it says after the last step."""

import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from deltasync.client import Policy, ValueType
from deltasync.core.errors import DeltasyncError
from deltasync.trainer.clicks.model_options import ModelOptions
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.clicks.training_options import TrainingOptions
from deltasync.trainer.demo import processes, run
from deltasync.trainer.demo.command import demo
from deltasync.trainer.demo.options import DemoOptions, Fleet
from deltasync.trainer.demo.processes import DemoFailed, Processes
from deltasync.trainer.demo.progress import DemoProgress
from deltasync.trainer.demo.report import print_report
from deltasync.trainer.demo.run import run_demo
from deltasync.trainer.demo.verdict import WHATS

STREAM = StreamOptions(
    data="synthetic",
    events=1000,
    events_per_second=1000.0,
    batch_size=64,
    seed=0,
    start_file=None,
    model=ModelOptions(),
)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary ones."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_dim_that_the_value_type_does_not_take_leaves_nothing(temporary: Path) -> None:
    stream = replace(STREAM, model=ModelOptions(dim=6))
    policy = Policy(value_type=ValueType.INT4_TBE)
    options = DemoOptions(stream=stream, training=TrainingOptions(), policy=policy)
    with pytest.raises(DeltasyncError, match="--dim 6: value type int4-tbe takes multiples of 4"):
        run_demo(options, Console(file=io.StringIO()))
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("stream", "training", "why"),
    [
        ({"data": "kafka"}, {}, "unknown data 'kafka'"),
        ({"data": "ratings:nowhere"}, {}, "nowhere: cannot be read"),
        ({"events": 100}, {}, "100 events: the demo needs at least two batches of 64"),
        ({}, {"grad_accum": 3}, "2 ranks share it evenly, 3 micro-batches each"),
        ({"model": ModelOptions(managed=True)}, {"input": "tensordict"}, "takes KeyedJaggedTensors only"),
        (
            {"model": ModelOptions(managed=True)},
            {"accumulate_tables": True},
            "gives rows away between micro-batches",
        ),
    ],
)
def test_what_cannot_be_run_leaves_nothing(
    temporary: Path, stream: dict[str, Any], training: dict[str, Any], why: str
) -> None:
    options = DemoOptions(stream=replace(STREAM, **stream), training=TrainingOptions(**training))
    with pytest.raises(DeltasyncError, match=why):
        run_demo(options, Console(file=io.StringIO()))
    assert not list(temporary.iterdir())


@pytest.mark.parametrize(
    ("arguments", "value_type", "managed"),
    [
        ([], ValueType.FP32, False),
        (["--model", "mch"], ValueType.FP32, True),
        (["--dtype", "int8"], ValueType.INT8, False),
        (["--serve", "int8"], ValueType.INT8_TBE, True),
        (["--serve", "int4", "--dtype", "int4-tbe"], ValueType.INT4_TBE, True),
        (["--dtype", "int8-tbe"], ValueType.INT8_TBE, True),
        (["--serve", "int8", "--model", "clicks"], ValueType.INT8_TBE, False),
    ],
)
def test_predictors_have_quantised_tables_and_managed_collision_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], value_type: ValueType, managed: bool
) -> None:
    asked: list[DemoOptions] = []

    def stopped(options: DemoOptions, _: Console) -> None:
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_demo", stopped)
    CliRunner().invoke(demo, arguments)
    [options] = asked
    assert (options.policy.value_type, options.stream.model.managed) == (value_type, managed)
    serves = value_type.tbe_bits is not None
    assert [(fleet.serves, fleet.frozen) for fleet in options.fleets] == (
        [(True, False), (True, True)] if serves else [(False, False)]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json", "nowhere/report.json"],
        ["--dim", "5"],
        ["--top-k", "-1"],
        ["--model", "x"],
        ["--serve", "int2"],
        ["--serve", "int8", "--dtype", "fp16"],
    ],
)
def test_a_wrong_use_leaves_nothing(temporary: Path, arguments: list[str]) -> None:
    assert CliRunner().invoke(demo, arguments).exit_code == 2
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("arguments", [["--serve", "int8"], ["--dtype", "int4-tbe"]])
def test_predictors_that_fall_behind_on_purpose_have_no_limit(temporary: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(demo, [*arguments, "--ready-within", "1"])
    assert done.exit_code == 1
    assert "--ready-within: the demo's predictors fall behind on purpose" in str(done.exception)
    assert not list(temporary.iterdir())


def test_an_interrupt_leaves_nothing(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        assert list(temporary.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(Processes, "start", interrupted)
    options = DemoOptions(stream=STREAM, training=TrainingOptions())
    with pytest.raises(KeyboardInterrupt):
        run_demo(options, Console(file=io.StringIO()))
    assert not list(temporary.iterdir())


def test_what_the_first_start_waits_for_is_said_before(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "warm", compiled)
    said = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoOptions(stream=STREAM, training=TrainingOptions()), Console(file=said, width=200))
    assert said.getvalue() == (
        "starting the service; the first time its kernels are compiled, half a minute or more\n"
    )
    assert not list(temporary.iterdir())


def test_the_logs_of_a_failure_are_kept_and_named(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise DemoFailed("service ended with status 1")

    monkeypatch.setattr(Processes, "start", fails)
    options = DemoOptions(stream=STREAM, training=TrainingOptions())
    with pytest.raises(DemoFailed) as failed:
        run_demo(options, Console(file=io.StringIO()))
    [folder] = temporary.iterdir()
    assert str(failed.value) == f"service ended with status 1\nlogs and results: {folder}"


@pytest.mark.parametrize(("keep", "unexpected"), [(False, KeyError), (False, OSError), (True, KeyboardInterrupt)])
def test_the_logs_are_kept_and_named_after_an_unexpected_error_and_on_demand(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, unexpected: type[BaseException]
) -> None:
    def fails(folder: Path, **_: object) -> None:
        (folder / "trainer.log").touch()
        raise unexpected

    monkeypatch.setattr(run, "play", lambda *_: 0)
    monkeypatch.setattr(run, "build_report", fails)
    options, said = DemoOptions(stream=STREAM, training=TrainingOptions(), keep=keep), io.StringIO()
    with pytest.raises(unexpected):
        run_demo(options, Console(file=said))
    [folder] = temporary.iterdir()
    assert (folder / "trainer.log").exists()
    assert said.getvalue() == f"logs and results: {folder}\n"


@pytest.mark.parametrize(("keep", "rows_equal", "left"), [(False, True, 0), (True, True, 1), (False, False, 1)])
def test_the_logs_are_removed_once_all_rows_are_equal(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, rows_equal: bool, left: int
) -> None:
    monkeypatch.setattr(run, "play", lambda *_: 0)
    monkeypatch.setattr(run, "build_report", lambda *_, **__: {"rows_equal": rows_equal})
    options, said = DemoOptions(stream=STREAM, training=TrainingOptions(), keep=keep), io.StringIO()
    run_demo(options, Console(file=said))
    folders = list(temporary.iterdir())
    assert len(folders) == left
    assert said.getvalue() == "".join(f"logs and results: {folder}\n" for folder in folders)


def test_what_is_waited_for_after_the_last_step_is_said_now_and_then() -> None:
    now, said = 0.0, io.StringIO()
    with DemoProgress(Console(file=said, width=200), steps=10, clock=lambda: now) as progress:
        progress.show_wait({"lag": {"versions": 2, "rows": 1234}})
        progress.show_wait({"lag": {"versions": 2, "rows": 1200}})
        now = 2.0
        progress.show_wait({"lag": {"versions": 1, "rows": 30}})
        progress.show_wait({"lag": {"versions": 0, "rows": 0}})
    assert said.getvalue().splitlines() == [
        "  draining: 1,234 rows left, 2 versions",
        "  draining: 30 rows left, 1 version",
    ]


def test_what_a_replica_received_is_a_share_of_what_was_published() -> None:
    report = {
        "freshness_seconds": {"p50": 0.1, "p99": 0.2, "max": 0.3},
        "bytes_full_push": 1_024_300_000,
        "bytes_published": 29_400_000,
        "bytes_received": 28_500_000,
        "policy": {"value_type": "fp32", "top_k": None},
        "answers": None,
        **{f"{what}_equal": True for what in WHATS},
        **{f"{what}_compared": 10 for what in WHATS},
        "evictions": 0,
        "rows_used": {},
        "versions": 294,
        "steps": 586,
        "rows_published": 471_537,
        "service_restarts": 0,
        "rows_compared": 108_506,
        "events_evaluated": 1000,
        "auc": dict.fromkeys(("trainer", "synced", "frozen"), 0.5),
        "log_loss": dict.fromkeys(("trainer", "synced", "frozen"), 0.5),
    }
    printed = io.StringIO()
    print_report(report, Console(file=printed, width=200))
    assert (
        "received      28.5 MB by a replica, 97 % of what was published, 1/36 of full pushes\n"
        in printed.getvalue()
    )


def test_what_was_waited_for_in_vain_is_said_in_words() -> None:
    """The whole answer of the service would say it too, in 40 lines for each consumer."""
    lags = [
        {"replicas": [], "state": "empty", "reason": "no replica subscribes", "tables": [1, 2]},
        {"replicas": ["x"], "state": "in sync", "reason": "all 1 hold the newest", "tables": [1, 2]},
    ]
    fleets = [Fleet("predictors", ("p",), Policy()), Fleet("top", ("x", "y"), Policy())]
    assert run.hindrance(list(zip(lags, fleets, strict=True))) == (
        "consumer predictors has 0 of 1 replica and is empty: no replica subscribes; "
        "consumer top has 1 of 2 replicas and is in sync: all 1 hold the newest"
    )
    assert run.hindrance([]) == "the service does not answer"
