"""Row 27: tables behind managed collision, whose rows are given to other ids."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from tests.integration.trainer.torchrec_defects.copies import changed, followed, ids_of
from tests.integration.trainer.torchrec_defects.models import (
    bag,
    collided,
    kernels_of,
    lookups,
    sequence,
    sharded,
)
from tests.integration.trainer.torchrec_defects.scenarios import scenario
from tests.integration.trainer.tracking.rows import weights
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise

from deltasync.base.errors import DeltasyncError
from deltasync.trainer.tracking import Tracker

BAGS, SEQUENCES = "collided._embedding_module.embedding_bags.t", "collided._embedding_module.embeddings.t"
KINDS = {BAGS: "bags", SEQUENCES: "sequences"}


def _model(kind: str) -> DistributedModelParallel:
    module = collided(bag("t") if kind == "bags" else sequence("t"))
    model = sharded({"collided": module}, {"t": row_wise(compute_kernel="fused")})
    _stub_resets(model, Mock())
    return model


def _stub_resets(model: nn.Module, reset: Mock) -> None:
    """FBGEMM resets momentum on a GPU only; rows are then reset by TorchRec itself, which runs here too."""
    for kernel in kernels_of(model):
        kernel.reset_embedding_weight_momentum = reset


@scenario(row=27)
def rows_evicted_while_paused_are_reported() -> None:
    for fqn, kind in KINDS.items():
        model = _model(kind)
        tracker, copy = followed(model)
        before = weights(model)
        with tracker.pause():
            model(lookups(t=[1, 2, 3]))
        tracker.step()
        assert changed(model, before)
        assert copy.update()[fqn]
        copy.check(model)


@scenario(row=27)
def rows_are_not_read_while_they_are_evicted() -> None:
    for kind in KINDS.values():
        model = _model(kind)
        tracker = Tracker(model)
        reset = Mock(side_effect=partial(_read_in_vain, tracker))
        _stub_resets(model, reset)
        _evict(model, tracker)
        reset.assert_called()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(tracker.get_delta).result().rows


def _read_in_vain(tracker: Tracker, **_: object) -> None:
    with ThreadPoolExecutor(1) as other, pytest.raises(DeltasyncError, match="has not ended"):
        other.submit(tracker.get_delta, timeout_seconds=0.01).result()


@scenario(row=27)
def two_trackers_see_evictions_and_leave_one_by_one() -> None:
    for fqn, kind in KINDS.items():
        model = _model(kind)
        one, other = Tracker(model), Tracker(model)
        _evict(model, one, other)
        assert ids_of(one.get_delta()) == ids_of(other.get_delta()) != {}
        one.close()
        one.acknowledge(one.get_delta())
        other.acknowledge(other.get_delta())
        before = weights(model)
        _evict(model, other)
        assert set(changed(model, before)[fqn]) <= set(ids_of(other.get_delta())[fqn])
        assert not one.get_delta().rows
        other.close()
        other.acknowledge(other.get_delta())
        _evict(model)
        assert not other.get_delta().rows


def _evict(model: nn.Module, *trackers: Tracker) -> None:
    """A forward that gives rows to ids never seen before."""
    model(lookups(t=torch.randint(10**12, (3,)).tolist()))
    for tracker in trackers:
        tracker.step()
