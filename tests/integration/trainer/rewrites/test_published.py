"""A replica of a model whose rows change in unusual ways equals it in the end."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

from deltasync.client import NumpyTarget, Subscriber, SubscriberOptions

RANKS = str(Path(__file__).with_name("published_ranks.py"))


def replica_of(service: ServiceProcess, folder: Path, what: str, ranks: int) -> NumpyTarget:
    """What a replica has of a model in training to which something happens."""
    target = NumpyTarget()
    with Subscriber(
        SubscriberOptions(service=service.grpc, consumer="predictors", replica="p0"), target
    ) as replica:
        run_ranks(RANKS, what, service.grpc, str(folder), ranks=ranks)
        replica.wait_for(service.get_json("/consumers/predictors/lag")["head"], 30)
    return target


def held_by(folder: Path, ranks: list[int]) -> dict[str, torch.Tensor]:
    """What some ranks held together at the end."""
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, rows in torch.load(folder / f"rank{rank}.pt").items():
            known = whole.setdefault(name, rows)
            whole[name] = torch.where(known.isnan(), rows, known)
    return whole


def assert_equal(target: NumpyTarget, held: dict[str, torch.Tensor]) -> None:
    with target.reading() as reading:
        tables = reading.tables
        assert tables.keys() == held.keys()
        for name, rows in held.items():
            np.testing.assert_array_equal(tables[name], rows.numpy().reshape(tables[name].shape), err_msg=name)


@pytest.mark.nightly
def test_tables_that_move_between_ranks(service: ServiceProcess, tmp_path: Path) -> None:
    target = replica_of(service, tmp_path, "moves", ranks=2)
    assert_equal(target, held_by(tmp_path, [0, 1]))


@pytest.mark.nightly
def test_replicas_that_are_averaged(
    service: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them is published: after its averages, and the steps of its own after those."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # TorchRec asserts that the device is a GPU.
    target = replica_of(service, tmp_path, "averages", ranks=4)
    # TorchRec has ranks 0 and 2 train one, and ranks 1 and 3 the other.
    assert_equal(target, held_by(tmp_path, [0, 2]))
    other = held_by(tmp_path, [1, 3])
    assert any(not torch.equal(rows, other[name]) for name, rows in held_by(tmp_path, [0, 2]).items())
    assert [len((tmp_path / f"tracked{rank}.txt").read_text().split()) for rank in (1, 3)] == [0, 0]
