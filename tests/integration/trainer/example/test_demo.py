"""`deltasync demo`, small, with the service killed in the middle."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.command import deltasync
from tests.support.programs import run_program

COMMAND = [sys.executable, "-m", "deltasync", "demo"]
SMALL = [
    "--events",
    "6000",
    "--events-per-second",
    "1500",
    "--users",
    "500",
    "--items",
    "300",
    "--batch-size",
    "64",
]


@pytest.mark.nightly
def test_rows_are_equal_after_micro_batches_of_tensordicts_although_the_service_is_killed(tmp_path: Path) -> None:
    found = tmp_path / "demo.json"
    # 95 steps, the last of two micro-batches.
    ways = ["--events", "6018", "--grad-accum", "4", "--amp", "--input", "tensordict"]
    arguments = [*SMALL, *ways, "--kill-service-at", "0.5", "--json", str(found)]
    done = run_program(*COMMAND, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rows equal:" in done.stdout
    report = json.loads(found.read_text())
    assert report["rows_equal"] is True
    assert report["outputs_equal"] is True
    assert (report["map_equal"], report["buffers_equal"]) == (None, None), "the model has none"
    assert report["service_restarts"] == 1, "the fault must have happened"
    assert set(report["auc"]) == {"trainer", "synced", "frozen"}
    assert all(0 < value < 1 for value in report["auc"].values())
    assert set(report["freshness_seconds"]) == {"p50", "p99", "max"}
    # How many cuts are absorbed, the machine decides; the last steps are always a version of their own.
    assert report["versions"] > 1
    assert report["versions"] + report["cuts_absorbed"] > 10
    assert 0 < report["bytes_published"] < report["bytes_full_push"]
    assert report["rows_published"] > 0
    assert report["steps"] == 95
    assert report["events_evaluated"] == 6018 - 6018 // 2


def _hear_ctrl_c() -> None:
    """Whoever runs the tests in the background has them ignore it."""
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


@pytest.mark.nightly
def test_everything_stays_up_to_be_looked_at_and_broken_until_ctrl_c() -> None:
    with (
        subprocess.Popen(
            [*COMMAND, *SMALL, "--hold"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_ctrl_c,
        ) as demo,
        ExitStack() as stack,
    ):
        stack.callback(demo.kill)  # Or whatever goes wrong here would wait for it.
        found = _said(demo, r"all else stays up until Ctrl-C: (http://\S+)/ shows it")
        status = json.loads(
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{found[1]}/status").read()
        )
        assert [each["state"] for each in status["consumers"]] == ["in sync"]
        assert status["cuts"]
        pids = _said(demo, r"by its pid: replica-0 (\d+), replica-1 (\d+), service (\d+)$")
        os.kill(int(pids[1]), signal.SIGTERM)
        _said(demo, r"^replica-0 has ended \(status 0\)$")
        os.kill(int(pids[3]), signal.SIGKILL)
        _said(demo, r"^service has ended \(status -9\)$")
        demo.send_signal(signal.SIGINT)
        rest, complained = demo.communicate()
        assert demo.wait() == 0, rest + complained
    assert "rows equal:   yes" in rest


@pytest.mark.nightly
def test_everything_runs_with_mutual_tls_and_roles(tmp_path: Path) -> None:
    found = tmp_path / "demo.json"
    done = run_program(*COMMAND, *SMALL, "--events", "3000", "--secure", "--keep", "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(found.read_text())["rows_equal"] is True
    assert "deltasync lag predictors --endpoint " in done.stdout
    (folder,) = re.findall(r"^logs and results: (.+)$", done.stdout, re.MULTILINE)
    log, keys = (Path(folder) / "service.log").read_text(), list(Path(folder).rglob("*-key.pem"))
    modes = {path.stat().st_mode & 0o777 for path in (*keys, Path(folder) / "status-token")}
    token = (Path(folder) / "status-token").read_text()
    shutil.rmtree(folder)
    assert "http=https://" in log
    assert "role=admin name=admin " in log
    assert (len(keys), modes) == (5, {0o600})
    assert token not in log + done.stdout + done.stderr


@pytest.mark.nightly
def test_rows_are_equal_after_steps_of_micro_batches_that_update_tables_once(tmp_path: Path) -> None:
    found = tmp_path / "demo.json"
    ways = ["--grad-accum", "4", "--amp", "--input", "tensordict", "--accumulate-tables"]
    arguments = [
        *SMALL,
        "--events",
        "3010",
        *ways,
        "--json",
        str(found),
    ]  # 48 steps, the last of two micro-batches.
    done = run_program(*COMMAND, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert report["rows_equal"] is True
    assert report["steps"] == 48
    assert report["events_evaluated"] == 3010 - 3010 // 2


@pytest.mark.nightly
def test_replicas_of_a_policy_reach_the_quantised_rows_although_the_service_is_killed(tmp_path: Path) -> None:
    found = tmp_path / "demo.json"
    policy = ["--top-k", "0.1", "--dtype", "int8", "--kill-service-at", "0.5"]
    arguments = [*SMALL, *policy, "--json", str(found)]
    done = run_program(*COMMAND, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert (report["rows_equal"], report["service_restarts"]) == (True, 1)
    assert (report["policy"]["top_k"], report["policy"]["value_type"]) == (0.1, "int8")
    assert 0 < report["bytes_received"] < report["bytes_published"] / 2


@pytest.mark.nightly
def test_a_model_whose_rows_change_hands_is_equal_in_rows_map_buffers_and_outputs(tmp_path: Path) -> None:
    found = tmp_path / "demo.json"
    done = run_program(*COMMAND, *SMALL, "--model", "mch", "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert [report[f"{what}_equal"] for what in ("rows", "map", "buffers", "outputs")] == [True] * 4
    rows = 125 + 75  # of users and items
    assert report["map_compared"] == 2 * rows
    assert report["buffers_compared"] == 2 * 3
    assert report["outputs_compared"] == 2 * (6000 % 64 or 64)
    assert report["outputs_off_trainer"] < 1e-5
    assert report["evictions"] > 100
    assert all(used > 10 for ranks in report["rows_used"].values() for used in ranks), "ids go to all ranks"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "value_type", "managed"),
    [
        (["--serve", "int8", "--kill-service-at", "0.5"], "int8-tbe", True),
        (["--serve", "int4", "--model", "clicks", "--top-k", "0.5"], "int4-tbe", False),
    ],
    ids=["int8", "int4"],
)
def test_predictors_hold_and_answer_what_the_trainer_s_model_does_quantised_anew(
    tmp_path: Path, arguments: list[str], value_type: str, managed: bool
) -> None:
    found = tmp_path / "demo.json"
    done = run_program(*COMMAND, *SMALL, *arguments, "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert [report[f"{what}_equal"] for what in ("rows", "outputs")] == [True, True]
    assert [report[f"{what}_equal"] for what in ("map", "buffers")] == [True if managed else None] * 2
    assert report["policy"]["value_type"] == value_type
    assert report["service_restarts"] == int("--kill-service-at" in arguments)
    # Every batch, and the last one once more.
    assert report["answers"]["count"] == -(-6000 // 64) + 1
    assert report["answers"]["age_seconds"]["p50"] > 0
    assert report["events_evaluated"] == 3000
    assert report["auc"]["synced"] > 0.6
    assert report["outputs_compared"] == (6000 % 64 or 64)
    # Quantised, against fp32 as it is published.
    assert 0 < report["bytes_received"] < report["bytes_published"]


def test_a_policy_that_cannot_be_met_is_a_wrong_use() -> None:
    status, _, said = deltasync("demo", "--top-k", "1000", "--max-bytes", "99")
    assert status == 2
    assert "max_bytes 99 is less than the 10000 bytes of 1000 rows" in said


def test_batches_that_micro_batches_cannot_share_are_one_line() -> None:
    status, _, said = deltasync("demo", "--batch-size", "64", "--grad-accum", "3")
    assert status == 1
    assert said.splitlines()[-1] == (
        "Error: --batch-size 64: 2 ranks share it evenly, 3 micro-batches each; choose a multiple of 6"
    )


def test_an_unknown_stream_is_one_line() -> None:
    status, _, said = deltasync("demo", "--data", "kafka")
    assert status == 1
    assert said.splitlines()[-1].startswith("Error: unknown data 'kafka'")
    assert "Traceback" not in said
