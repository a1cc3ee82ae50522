"""`python -m tests.soak`, short and with few processes."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.soak.__main__ import soak
from tests.support.object_storage import PROGRAM as WEED
from tests.support.programs import run_program


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        pytest.param(1091, {"bit flipped under the service", "kill everything"}, marks=pytest.mark.nightly),
        pytest.param(
            3682,
            {"bit flipped under the service", "clock set", "connection dead behind a proxy", "storage hangs"},
            marks=[pytest.mark.nightly, pytest.mark.skipif(WEED is None, reason="there is no weed")],
        ),
    ],
)
def test_nothing_is_lost_in_a_short_soak(tmp_path: Path, seed: int, kinds: set[str]) -> None:
    found = tmp_path / "soak.json"
    arguments = ["--small", "--seconds", "10", "--seed", f"{seed}", "--mean-gap", "0.75", "--json", str(found)]
    done = run_program(sys.executable, "-m", "tests.soak", *arguments)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert (report["rows_lost"], report["replicas_equal"], report["versions_lost"]) == (0, True, 0)
    for findings in (
        "problems",
        "leftovers",
        "mixed_versions",
        "steps_back",
        "not_recovered",
        "tracebacks",
        "troubles",
    ):
        assert report[findings] == [], findings
    assert sum(report["faults"].values()) >= 5
    assert kinds <= {kind for kind, count in report["faults"].items() if count}
    assert report["versions"] > 10
    assert 0 < report["recover_seconds"]["p50"] <= report["recover_seconds"]["p99"]
    assert report["memory"]["service"] > 0
    assert 0 < report["directory_bytes"] <= report["directory_bytes_most"]
    assert report["reconnects"] > 0
    assert sum(report["starts"].values()) > len(report["starts"])
    for line in ("versions", "reconnects", "bytes resent", "recovered", "rows lost", "replicas equal"):
        assert f"\n{line} " in done.stdout
    assert done.stdout.endswith("\nsound           yes\n")


def test_a_report_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    refused = CliRunner().invoke(soak, ["--json", str(tmp_path / "none" / "soak.json")])
    assert refused.exit_code == 2
    assert f"there is no folder {tmp_path / 'none'}" in refused.output
