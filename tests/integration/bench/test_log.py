"""`python -m tests.bench log`, small: the same records go to LMDB, to one broker and to three."""

import json
import sys
from pathlib import Path

import pytest
from tests.support.programs import run_program


@pytest.mark.nightly
def test_records_go_to_all_logs(tmp_path: Path) -> None:
    found = tmp_path / "figures.json"
    options = ("--records", "3", "--rounds", "1", "--json", str(found))
    done = run_program(sys.executable, "-m", "tests.bench", "log", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    assert "never retrieved" not in done.stderr
    figures = json.loads(found.read_text())
    assert (figures["records"], figures["rounds"]) == (3, 1)
    assert all(figures[name] > 0 for name in ("lmdb_mb_s", "jetstream_ratio", "jetstream3_ratio"))
