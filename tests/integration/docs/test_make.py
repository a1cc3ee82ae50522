"""What `make` does that no test of the code sees."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.documents import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_clean_leaves_what_people_made_and_nothing_that_was_compiled(tmp_path: Path) -> None:
    """Kernels are kept beside the package, where a later build would find them."""
    made = ["a/kernels/sums.py", "README.md", "deltasync-data/log/data.mdb"]
    compiled = ["a/kernels/__pycache__/sums.py310.1.nbc", "tests/__pycache__/t.pyc", ".venv/bin/python", "build/x"]
    for name in (*made, *compiled):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True, timeout=60)  # noqa: S607
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"Makefile", *made}
