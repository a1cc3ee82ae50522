"""`deltasync demo`, small, in each of its ways."""

import re
import signal
import subprocess
import sys

import pytest
from tests.support.command import deltasync
from tests.support.programs import ROOT, killed, run_program

from deltasync.client.admin import Admin

COMMAND = [sys.executable, "-m", "deltasync", "demo"]
SMALL = ["--events", "4000", "--events-per-second", "1500"]


def _heed_ctrl_c() -> None:
    """A shell that runs the tests in the background makes them ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _line(demo: "subprocess.Popen[str]", pattern: str) -> re.Match[str]:
    """The next line that matches."""
    assert demo.stdout
    passed = list[str]()
    for line in demo.stdout:
        if found := re.search(pattern, line):
            return found
        passed.append(line)
    pytest.fail(f"no {pattern!r} in {passed}")


@pytest.mark.nightly
def test_demo_runs_until_ctrl_c_and_finds_all_rows_equal() -> None:
    with killed(
        subprocess.Popen(
            [*COMMAND, *SMALL, "--hold"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            preexec_fn=_heed_ctrl_c,
        )
    ) as demo:
        http = _line(demo, r"everything runs until Ctrl-C; see (http://\S+)/$")[1]
        assert Admin(http).consumer("predictors")["state"] == "in sync"
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    for who in ("trainer, before learning from the event", "synced replica", "replica frozen halfway through"):
        assert re.search(rf"{who}.* 0\.\d{{4}} ", output)
    assert re.search(r"^freshness +p50 0\.\d{3} s ", output, re.MULTILINE)
    assert output.endswith("\nrows equal:   yes\n")


def run(*arguments: str) -> str:
    done = run_program(*COMMAND, *SMALL, *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("\nrows equal:   yes\n")
    return done.stdout


def test_a_short_demo_ends_with_equal_rows() -> None:
    run("--ranks", "1", "--events", "256", "--events-per-second", "100000")


@pytest.mark.nightly
def test_maps_of_raw_ids_and_buffers_are_equal_too() -> None:
    compared = re.search(r"^compared +([\d,]+) rows", run("--managed"), re.MULTILINE)
    assert compared
    # Two replicas; users and items each have rows, entries of the map, and ranges.
    assert int(compared[1].replace(",", "")) > 2 * 3 * (5000 + 3000)


@pytest.mark.nightly
def test_replicas_of_a_policy_get_the_encoded_rows() -> None:
    output = run("--top-k", "0.1", "--dtype", "int8")
    assert "with the trainer's, as int8, bit by bit" in output
    share = re.search(r"by a replica, (\d+) % of what was published", output)
    assert share
    assert int(share[1]) < 50


@pytest.mark.nightly
def test_canary_objects_to_flipped_labels_and_the_model_is_rolled_back() -> None:
    output = run("--events", "30000", "--events-per-second", "1000", "--poison-at", "0.5")
    assert re.search("^consumer canary objects .*: the AUC of the last 2,048 events is", output, re.MULTILINE)
    versions = re.search(r"^rollback +to version (\d+), whose rows are .* version (\d+)$", output, re.MULTILINE)
    assert versions
    assert 1 <= int(versions[1]) < int(versions[2])
    assert re.search(f"^trainer +refused: .*was rolled back to version {versions[1]}: ", output, re.MULTILINE)
    canary, follower = (re.findall(r"0\.\d{4}", line) for line in re.findall("^│.*", output, re.MULTILINE))
    before, during, after = map(float, canary)
    assert before > 0.65 > during
    assert float(follower[1]) > during < after


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ranks", "3"], "batch_size: 128, expected a multiple of the 3 ranks"),
        (["--data", "x"], "unknown data 'x'"),
    ],
)
def test_wrong_options_are_an_error_in_one_line(arguments: list[str], why: str) -> None:
    status, _, error = deltasync("demo", *arguments)
    assert status == 1
    assert error.splitlines()[-1].startswith(f"Error: {why}")
    assert "Traceback" not in error
