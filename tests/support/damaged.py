"""A data directory to damage, a trainer that sends rows again, and checks of a service that is started on it."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.fleet import Recorder, Trainer, admin_of, as_sent, follow, wait_for_lag
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.client import Policy, Position, ResyncRequired, TableSpec, ValueType

Running = ServiceProcess | RunningService
TYPES = {"plain": ValueType.FP32, "small": ValueType.INT8}
REMEDY = "deltasync models give-up clicks"


@dataclass
class Written:
    """A data directory with versions 1 to 6, checkpoints of 2 and 4 on one base, and the rows at each version."""

    folder: Path
    tables: Sequence[TableSpec]
    position: Position = field(default_factory=Position)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def newest(self) -> dict[str, Any]:
        return self.rows[self.position.number]

    def write(self) -> None:
        """Write it. Its log begins after version 2."""
        with ServiceProcess(self.folder) as service, Resending(service, self) as trainer:
            admin = admin_of(service)
            self._note(trainer.publish_all(), trainer)
            for name, value_type in TYPES.items():
                admin.create_consumer(name, "clicks", Policy(value_type=value_type))
            with follow(service, "plain", "first", Recorder()), follow(service, "small", "first", Recorder()):
                for _ in range(5):
                    self._note(trainer.change(10), trainer)
                    for name in TYPES:
                        wait_for_lag(service, name, lambda lag: lag["lag"]["versions"] == lag["lag"]["rows"] == 0)
                    if self.position.number in (2, 4):
                        admin.make_checkpoint("clicks")
            assert service.terminate() == 0

    def _note(self, position: Position, trainer: Trainer) -> None:
        self.position = position
        self.rows[position.number] = {name: rows.copy() for name, rows in trainer.rows.items()}

    def copy(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return folder


class Resending(Trainer):
    """A trainer that sends rows again if the service asks for them, as `DeltaSync` does.

    Attributes:
        asked: the rows that the service named, by table.
        full: whether the service asked for every row.
    """

    def __init__(self, service: Running, written: Written) -> None:
        """Go on from the newest version of a data directory; at first from nothing."""
        super().__init__(service.grpc, written.tables, continues=written.position)
        self.asked, self.full = dict[str, list[int]](), False
        if written.rows:
            self.rows = {name: rows.copy() for name, rows in written.newest.items()}
            self._step = written.position.number

    def go_on(self) -> Position:
        """Change a row of each table, and publish it with what the service asks for."""
        ids = {table.name: np.array([3]) for table in self.tables}
        for rows in self.rows.values():
            rows[3] += 1
        try:
            return self._publish(list(ids.values()))
        except ResyncRequired as error:
            if error.changed is None:
                self.full = True
                return self.publish_all()
            self.asked = {name: rows.tolist() for name, rows in error.changed}
            return self._publish(
                [np.union1d(some, dict(error.changed).get(name, some)) for name, some in ids.items()]
            )


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def base_of(data_dir: Path) -> Path:
    """The file that all checkpoints share."""
    return max((data_dir / "checkpoints" / "clicks" / "data").iterdir(), key=lambda path: path.stat().st_size)


def manifests_of(data_dir: Path) -> list[Path]:
    """The manifests of all checkpoints, oldest first."""
    return sorted((data_dir / "checkpoints" / "clicks" / "manifests").iterdir())


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trouble(service: Running) -> str:
    """Why the service is not ready once it has recovered what it can; empty if it is."""

    def found() -> tuple[str, ...]:
        status, said = service.get("/readyz")
        text = "" if status == 200 else str(json.loads(said)["message"])
        return () if text == "still recovering: clicks" or "compiling" in text else (text,)

    return wait_for(found)[0]


def check_replicas(service: Running, written: Written, rows: Callable[[int], dict[str, Any]]) -> int:
    """Check that new replicas of all consumers get the rows of the version that they prove; return its number."""
    head = 0
    for consumer, value_type in TYPES.items():
        with follow(service, consumer, "new", target := Recorder()):
            head = wait_for_lag(service, consumer, _is_proven)["head"]
            for table in written.tables:
                expected = as_sent(table, rows(head)[table.name], value_type)
                np.testing.assert_array_equal(target.tables[table.name], expected)
    return head


def _is_proven(lag: dict[str, Any]) -> bool:
    """Whether replica "new" has proven that it holds everything."""
    lines = [each for each in lag["replicas"] if each["replica"] == "new"]
    return any(each["checked"] and not each["lag"]["rows"] and not each["lag"]["versions"] for each in lines)
