import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.soak.faults.choice import NotDone
from tests.soak.faults.disk import fill_disk
from tests.soak.faults.operators import negative
from tests.soak.schedule import Fault


def test_a_figure_below_0_is_found_wherever_it_is() -> None:
    lag = {"state": "in sync", "rows": 0, "seconds": 1.5, "none": None, "replicas": [{"a": 1}, {"age": -0.1}]}
    assert list(negative(lag)) == ["/replicas/1/age"]
    assert not list(negative({"replicas": [], "rows": 3}))


@pytest.mark.parametrize("runs", [True, False])
def test_the_disk_of_a_service_that_another_fault_has_taken_away_cannot_be_full(
    tmp_path: Path, *, runs: bool
) -> None:
    """Its process, or its directory, which is being put back."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    if not runs:
        (tmp_path / "log").mkdir()
        (tmp_path / "log" / "data.mdb").write_bytes(b"12")
    crew = SimpleNamespace(pid=lambda _: os.getpid() if runs else ended.pid)
    world: Any = SimpleNamespace(data_dir=tmp_path, crew=crew)
    with pytest.raises(NotDone, match="away"):
        fill_disk(world, Fault(0.0, "disk full", 0.0, 0.0))
