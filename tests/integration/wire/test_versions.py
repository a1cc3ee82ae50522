"""A service and clients one version apart work together, both ways."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.support import conversation
from tests.support.fleet import WAIT, Trainer, as_sent, follow
from tests.support.process import ServiceProcess, environment
from tests.support.server import TOKEN

from deltasync.client import NumpyTarget
from deltasync.core.value_types import ValueType

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHEEL = FIXTURES / "bf3f18d" / "deltasync-0.1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was. Unpacked, for a namespace package is not found in an archive."""
    folder = tmp_path_factory.mktemp("before")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


def hold_conversation(service: ServiceProcess, folder: Path, code: Path | None, state: str) -> dict[str, str]:
    """Let a client talk to a service, until that says that its consumers are in a state; the files that the client
    was made of, by module.
    """
    folder.mkdir()
    # Not with the script's folder on the path, whose modules hide others.
    arguments = [service.grpc, service.http, TOKEN, str(folder), state]
    command = [sys.executable, "-P", conversation.__file__, *arguments]
    done = subprocess.run(command, env=environment(code), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    files: dict[str, str] = json.loads((folder / "files.json").read_text())
    return files


def check_replicas(folder: Path) -> None:
    """Bit by bit."""
    sent_as = {"plain": None, "late": None, "ranked-0": ValueType.INT8, "ranked-1": ValueType.INT8}
    with np.load(folder / "model.npz") as model:
        for replica, value_type in sent_as.items():
            with np.load(folder / f"{replica}.npz") as held:
                assert held.keys() == model.keys()
                for table in conversation.TABLES:
                    rows = model[table.name]
                    wanted = as_sent(table, rows, value_type) if value_type else rows
                    assert held[table.name].tobytes() == wanted.tobytes(), (replica, table.name)


def test_clients_of_before_work_with_the_service_of_today(before: Path, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        files = hold_conversation(service, tmp_path / "out", before, "delivered")
    assert all(file is None or Path(file).is_relative_to(before) for file in files.values()), files
    assert "deltasync.client.connection" in files
    check_replicas(tmp_path / "out")


def test_clients_of_today_work_with_the_service_of_before(before: Path, tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data", code=before) as service:
        assert "format" not in json.loads((service.data_dir / "endpoints.json").read_text())
        files = hold_conversation(service, tmp_path / "out", None, "in sync")
    assert not any(file and Path(file).is_relative_to(before) for file in files.values()), files
    assert "deltasync.client.endpoint" in files
    check_replicas(tmp_path / "out")


def test_a_replica_of_today_is_ready_once_it_holds_what_a_service_of_before_sends(
    before: Path, tmp_path: Path
) -> None:
    """That says neither how new it is nor what the limit is."""
    with (
        ServiceProcess(tmp_path / "data", "--consumer", "predictors=clicks", code=before) as service,
        follow(service, "predictors", "a", NumpyTarget()) as replica,
        Trainer(service.grpc) as trainer,
    ):
        assert not replica.ready
        trainer.publish_all()
        replica.wait_until_ready(WAIT)
        assert replica.readiness.reason == "it has held the newest since it was started"
