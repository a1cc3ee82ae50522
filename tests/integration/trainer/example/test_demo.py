"""`deltasync demo`, small, in each of its ways."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.command import deltasync
from tests.support.programs import ROOT, run_program

from deltasync.client.shared.layout import DIRECTORY
from deltasync.trainer.example.demo import DemoOptions, run_demo
from deltasync.trainer.example.options import ModelOptions, StreamOptions

COMMAND = [sys.executable, "-m", "deltasync", "demo"]
SMALL = ["--events", "4000", "--events-per-second", "1500"]
BATCHES = -(-4000 // 128)


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    found = folder / "demo.json"
    done = run_program(*COMMAND, *SMALL, *arguments, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("\nrows equal:   yes\n")
    report: dict[str, Any] = json.loads(found.read_text())
    return report


@pytest.mark.nightly
def test_rows_are_equal_after_micro_batches_of_tensordicts(tmp_path: Path) -> None:
    # 32 steps, the last of two micro-batches.
    report = report_of(tmp_path, "--events", "4018", "--grad-accum", "4", "--amp", "--input", "tensordict")
    assert [report[f"{what}_equal"] for what in ("rows", "outputs")] == [True, True]
    assert (report["map_equal"], report["buffers_equal"]) == (None, None), "the model has none"
    assert set(report["auc"]) == {"trainer", "synced", "frozen"}
    assert all(0 < value < 1 for value in report["auc"].values())
    assert set(report["freshness_seconds"]) == {"p50", "p99", "max"}
    # The machine decides how many cuts are absorbed. The last steps are always a version of their own.
    assert report["versions"] > 1
    assert report["versions"] + report["cuts_absorbed"] > 10
    assert 0 < report["bytes_published"] < report["bytes_full_push"]
    assert report["rows_published"] > 0
    assert report["steps"] == BATCHES
    assert report["events_evaluated"] == 4018 - 4018 // 2


@pytest.mark.nightly
def test_replicas_of_a_policy_reach_the_quantised_rows(tmp_path: Path) -> None:
    report = report_of(tmp_path, "--top-k", "0.1", "--dtype", "int8")
    assert report["rows_equal"] is True
    assert (report["policy"]["top_k"], report["policy"]["value_type"]) == (0.1, "int8")
    assert 0 < report["bytes_received"] < report["bytes_published"] / 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "value_type", "managed"),
    [
        (["--serve", "int8"], "int8-tbe", True),
        (["--serve", "int4", "--model", "clicks", "--top-k", "0.5"], "int4-tbe", False),
    ],
    ids=["int8", "int4"],
)
def test_predictors_hold_and_answer_what_the_trainer_s_model_does_quantised_anew(
    tmp_path: Path, arguments: list[str], value_type: str, managed: bool
) -> None:
    report = report_of(tmp_path, *arguments)
    assert [report[f"{what}_equal"] for what in ("rows", "outputs")] == [True, True]
    assert [report[f"{what}_equal"] for what in ("map", "buffers")] == [True if managed else None] * 2
    assert report["policy"]["value_type"] == value_type
    assert report["answers"]["count"] == BATCHES + 1, "every batch, and the last one once more"
    assert report["answers"]["age_seconds"]["p50"] > 0
    assert report["events_evaluated"] == 2000
    assert report["outputs_compared"] == 4000 % 128
    assert 0 < report["bytes_received"] < report["bytes_published"], "quantised, against fp32 as it is published"


@pytest.mark.nightly
def test_all_workers_over_one_mirror_answer_what_the_trainer_s_model_does(tmp_path: Path) -> None:
    report = report_of(tmp_path, "--serve", "shared")
    assert [report[f"{what}_equal"] for what in ("rows", "outputs")] == [True, True]
    assert report["workers"] == 4, "and the demo fails unless all of them answer, and alike"
    assert report["answers"]["count"] == BATCHES
    assert report["outputs_compared"] == 2 * (4000 % 128), "of the workers, and of a replica beside them"
    assert not list(DIRECTORY.glob("deltasync-demo-*")), "the memory is free again"


@pytest.mark.nightly
def test_a_model_whose_rows_change_hands_is_equal_in_rows_map_buffers_and_outputs() -> None:
    said = io.StringIO()
    stream = StreamOptions(events=6000, events_per_second=1500.0, batch_size=64)
    sizes = ModelOptions(users=500, items=300, managed=True)
    report = run_demo(DemoOptions(stream=stream, sizes=sizes), Console(file=said))
    assert [report[f"{what}_equal"] for what in ("rows", "map", "buffers", "outputs")] == [True] * 4, (
        said.getvalue()
    )
    assert report["map_compared"] == 2 * (125 + 75), "users and items of two replicas"
    assert report["buffers_compared"] == 2 * 3
    assert report["outputs_compared"] == 2 * (6000 % 64)
    assert report["outputs_off_trainer"] < 1e-5
    assert report["evictions"] > 100
    assert all(used > 10 for ranks in report["rows_used"].values() for used in ranks), "ids go to all ranks"


@pytest.mark.nightly
def test_a_canary_objects_to_flipped_labels_and_a_rollback_brings_the_rows_of_the_followers_back(
    tmp_path: Path,
) -> None:
    plot = tmp_path / "auc.png"
    report = report_of(
        tmp_path,
        *(
            "--events",
            "30000",
            "--events-per-second",
            "1000",
            "--poison-at",
            "0.5",
            "--plot",
            str(plot),
            "--secure",
        ),
    )
    assert [report[f"{what}_equal"] for what in ("rows", "outputs")] == [True, True]
    assert report["rows_compared"] > 0
    assert 1 <= report["version"] < report["rollback_version"]
    assert (
        f"the model was rolled back to version {report['version']}: restart the trainer of run"
        in report["refused"]
    )
    assert 15_000 == report["poisoned_from"] < report["objected_at"] < report["rolled_back_at"] < 30_000
    assert report["auc"].keys() == {"before", "during", "after"}
    during, after = report["auc"]["during"], report["auc"]["after"]
    for live in ("predictors", "canary"):
        assert report["auc"]["before"][live] > 0.65
        assert during[live] < 0.5 < during["followers"]
        assert after[live] > 0.5
    assert set(report["curve"]) == {"events", "predictors", "canary", "followers"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def _hear_ctrl_c() -> None:
    """A shell that runs the tests in the background has them ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _said(demo: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """The next line that matches."""
    assert demo.stdout
    passed = list[str]()
    for line in demo.stdout:
        if found := re.search(pattern, line):
            return found
        passed.append(line)
    pytest.fail(f"no {pattern!r} in {passed}")


def test_all_processes_show_who_they_are_and_stay_up_to_be_broken_until_ctrl_c() -> None:
    with (
        subprocess.Popen(
            [*COMMAND, *SMALL, "--secure", "--hold"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            preexec_fn=_hear_ctrl_c,
        ) as demo,
        ExitStack() as stack,
    ):
        stack.callback(demo.kill)  # Or whatever goes wrong here would wait for it.
        endpoint = Path(_said(demo, r"deltasync lag predictors --endpoint (\S+)$")[1])
        _said(demo, r"everything else runs until Ctrl-C; see https://\S+/$")
        _said(demo, r"then the demo compares the replicas' rows with the trainer's, and prints the AUCs$")
        status, lag, complained = deltasync("lag", "predictors", "--endpoint", str(endpoint), "--json")
        assert (status, json.loads(lag)["state"]) == (0, "in sync"), complained
        folder = endpoint.parent
        log, keys = (folder / "service.log").read_text(), list(folder.rglob("*-key.pem"))
        modes = {path.stat().st_mode & 0o777 for path in (*keys, folder / "status-token")}
        assert "http=https://" in log
        assert "role=admin name=admin " in log
        assert (len(keys), modes) == (5, {0o600})
        token = (folder / "status-token").read_text()
        assert token not in log
        pids = _said(demo, r"by pid: replica-0 (\d+), replica-1 (\d+), service (\d+)$")
        os.kill(int(pids[1]), signal.SIGTERM)
        _said(demo, r"^replica-0 has ended \(status 0\)$")
        os.kill(int(pids[3]), signal.SIGKILL)
        _said(demo, r"^service has ended \(status -9\)$")
        demo.send_signal(signal.SIGINT)
        rest, complained = demo.communicate()
        assert demo.wait() == 0, rest + complained
    assert "rows equal:   yes" in rest
    assert "AUC" in rest
    assert not folder.exists()


def test_options_that_do_not_fit_are_one_line() -> None:
    status, _, said = deltasync("demo", "--grad-accum", "3")
    assert status == 1
    assert said.splitlines()[-1] == (
        "Error: batch_size: 128, expected a multiple of 6, for 2 ranks with 3 micro-batches each"
    )
    status, _, said = deltasync("demo", "--data", "kafka")
    assert status == 1
    assert said.splitlines()[-1].startswith("Error: unknown data 'kafka'")
    assert "Traceback" not in said
