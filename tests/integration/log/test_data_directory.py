"""After a service was killed its data directory opens again, and replicas go on from where they were."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.data_directory import POLICIES, Content, write
from tests.support.fleet import ITEM, TABLES, USER, WAIT, Recorder, as_sent, follow
from tests.support.server import RunningService

from deltasync.client import Position, ValueType

REPLICAS = [f"{consumer}/{replica}" for consumer in ("plain", "ranked") for replica in ("early", "late")]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Content]:
    folder = tmp_path_factory.mktemp("left")
    return folder, write(folder)


@pytest.fixture
def written(left: tuple[Path, Content], tmp_path: Path) -> Iterator[tuple[RunningService, Content]]:
    folder, content = left
    shutil.copytree(folder, tmp_path / "data")
    with RunningService(tmp_path / "data") as service:
        yield service, content


def test_consumers_policies_and_offsets_are_there_again(written: tuple[RunningService, Content]) -> None:
    service, content = written
    for consumer, policy in {"plain": None, **POLICIES}.items():
        lag = service.get_json(f"/consumers/{consumer}")
        assert lag["head"] == 7
        offsets = {each["replica"]: each["offset"] for each in lag["replicas"]}
        early, late = (content.held[f"{consumer}/{replica}"].number for replica in ("early", "late"))
        # A service that ends writes all offsets; one that is killed loses the last, which replicas tell again: on
        # a slow disk perhaps all that there was of a replica.
        assert offsets.keys() <= {"early", "late"}
        assert (offsets["early"], offsets.get("late", 0) <= late) == (early, True)
        assert {
            position.history for name, position in content.held.items() if name.startswith(f"{consumer}/")
        } == {lag["history"]}
        if policy:
            assert lag["policy"] == policy.as_dict()
            assert lag["release"]["version"] == 7


@pytest.mark.parametrize("replica", REPLICAS)
def test_a_replica_goes_on_from_where_it_was(written: tuple[RunningService, Content], replica: str) -> None:
    service, content = written
    consumer, name = replica.split("/")
    target = Recorder()
    target.tables = {
        table.name: content.rows[f"{replica}/{table.name}"].copy() for table in TABLES
    }  # What it kept of its own.
    with follow(service, consumer, name, target, held=content.held[replica]) as subscriber:
        wanted = _expected(content, ValueType.INT8 if consumer == "ranked" else ValueType.FP32)
        _wait_until(subscriber, target, wanted)
    assert not any(release.resync or release.whole for release in target.releases)


def _wait_until(subscriber: Any, target: Recorder, wanted: dict[str, bytes]) -> None:
    subscriber.wait_for(7, WAIT)
    while target.bytes() != wanted:
        number = subscriber.held.number
        subscriber.wait_for(Position(subscriber.held.history, number + 1), WAIT)


def _expected(content: Content, value_type: ValueType) -> dict[str, bytes]:
    return {table.name: as_sent(table, content.model[table.name], value_type).tobytes() for table in (USER, ITEM)}
