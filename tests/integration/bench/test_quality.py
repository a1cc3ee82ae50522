"""`python -m tests.bench quality`, small: a line for each policy, and a plot."""

import json
import sys
from pathlib import Path

import pytest
from tests.bench.quality import FLEETS, TITLES
from tests.support.programs import run_program

PNG = b"\x89PNG\r\n"


@pytest.mark.nightly
def test_each_policy_has_its_quality_and_its_bytes(tmp_path: Path) -> None:
    found, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    arguments = ["--events", "2560", "--events-per-second", "400", "--json", str(found), "--plot", str(plot)]
    done = run_program(sys.executable, "-m", "tests.bench", "quality", *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(found.read_text())["synthetic"]
    lines = {line["policy"]: line for line in figures["lines"]}
    assert list(lines) == [TITLES[fleet.consumer] for fleet in FLEETS]
    assert figures["events_evaluated"] == 1280
    assert all(0 < line["auc"] < 1 for line in lines.values())
    sent = {name: line["bytes"] for name, line in lines.items()}
    assert sent["top 1 % int8"] < sent["top 10 % int8"] < sent["full int8"] < sent["full fp32"]
    assert sent["full fp32"] < figures["full_push_bytes"]
    assert plot.read_bytes().startswith(PNG)
