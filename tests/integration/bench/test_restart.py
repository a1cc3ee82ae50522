"""`python -m tests.bench restart`, small: what is published again is of the rows that it tells of."""

import json
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_program


@pytest.mark.nightly
def test_a_restart_publishes_the_rows_that_came_after_and_its_own(tmp_path: Path) -> None:
    found = tmp_path / "figures.json"
    done = run_program(sys.executable, "-m", "tests.bench", "restart", "--rows", "50000", "--json", str(found))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(found.read_text())
    assert figures["resent_ratio"] == figures["resent_bytes"] / figures["lost_bytes"]
    assert figures["lost_bytes"] <= figures["resent_bytes"] <= figures["lost_bytes"] + figures["own_bytes"]
    assert figures["resent_bytes"] < figures["everything_bytes"] == 50_000 * (8 + 64)
