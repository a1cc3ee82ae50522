"""`python -m tests.bench acks`, small: replicas acknowledge what they are sent while cuts are sealed."""

import json
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_program


@pytest.mark.nightly
def test_replicas_acknowledge_while_cuts_are_sealed(tmp_path: Path) -> None:
    found = tmp_path / "figures.json"
    options = ("--replicas", "5", "--cuts", "3", "--json", str(found))
    done = run_program(sys.executable, "-m", "tests.bench", "acks", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    figures = json.loads(found.read_text())
    assert figures["seal_ratio_low"] <= figures["seal_ratio"] <= figures["seal_ratio_high"]
    assert (figures["replicas"], figures["cuts"]) == (5, 3)
    assert figures["acks_per_second"] > 0
