"""`python -m tests.bench failover`, small: an owner is killed, and a model moved."""

import json
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_program


@pytest.mark.nightly
def test_an_owner_is_killed_and_a_model_moved(tmp_path: Path) -> None:
    found = tmp_path / "figures.json"
    options = ("--rounds", "1", "--json", str(found))
    done = run_program(sys.executable, "-m", "tests.bench", "failover", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    figures = json.loads(found.read_text())
    assert figures["takeover_seconds"] > 0
    assert figures["move_held_seconds"] >= figures["move_seconds"] > 0
