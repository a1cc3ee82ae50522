"""A replica of a model whose replicas are averaged equals the first of them in the end."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.integration.trainer.following import subscriber
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

from deltasync.client import NumpyTarget


def held_by(folder: Path, *ranks: int) -> dict[str, torch.Tensor]:
    """What some ranks held together at the end."""
    whole: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, rows in torch.load(folder / f"rank{rank}.pt").items():
            known = whole.setdefault(name, rows)
            whole[name] = torch.where(known.isnan(), rows, known)
    return whole


@pytest.mark.nightly
def test_replicas_that_are_averaged(
    service: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them is published: after its averages, and the steps of its own after those."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # TorchRec asserts that the device is a GPU.
    target, script = NumpyTarget(), Path(__file__).with_name("published_ranks.py")
    with subscriber(service, target) as replica:
        run_ranks(str(script), service.grpc, str(tmp_path), ranks=4)
        replica.wait_for(service.get_json("/consumers/predictors")["head"], 30)
    # TorchRec has ranks 0 and 2 train one, and ranks 1 and 3 the other.
    first, other = held_by(tmp_path, 0, 2), held_by(tmp_path, 1, 3)
    tables = target.tables
    assert tables.keys() == first.keys()
    for name, rows in first.items():
        np.testing.assert_array_equal(tables[name], rows.numpy().reshape(tables[name].shape), err_msg=name)
    assert any(not torch.equal(rows, other[name]) for name, rows in first.items())
    assert [len((tmp_path / f"tracked{rank}.txt").read_text().split()) for rank in (1, 3)] == [0, 0]
