"""A data directory of which a part is missing: the service ends with a sentence, and not by a signal."""

import shutil
from pathlib import Path

import pytest
from tests.support.data_directory import unpack
from tests.support.process import ServiceProcess

FIXTURES = ["5ad1623", "301de71"]


@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("kept_pages", [2, 5, 9])
def test_a_log_that_is_cut_off_is_missed_before_it_is_read(tmp_path: Path, name: str, kept_pages: int) -> None:
    unpack(name, tmp_path)
    log = tmp_path / "log" / "data.mdb"
    log.write_bytes(log.read_bytes()[: kept_pages * 4096])
    ended = ServiceProcess(tmp_path).run_to_end()
    assert ended.returncode == 1
    assert f"the log in {log.parent} is cut off: pages are missing at the end of data.mdb" in ended.stderr
    assert "restore a backup with deltasync restore" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", FIXTURES)
def test_a_log_that_is_gone_from_beside_its_models_is_missed(tmp_path: Path, name: str) -> None:
    unpack(name, tmp_path)
    shutil.rmtree(tmp_path / "log")
    ended = ServiceProcess(tmp_path).run_to_end()
    assert ended.returncode == 1
    assert f"{tmp_path / 'models'} has tables, but the log beside it is missing" in ended.stderr
    assert "Traceback" not in ended.stderr
