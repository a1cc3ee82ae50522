"""Row 27: tables behind managed collision, whose ids are remapped and whose rows are reset."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from tests.integration.trainer.torchrec_defects.copies import Copy, changed, ids_of, weights
from tests.integration.trainer.torchrec_defects.models import (
    ROWS,
    bag,
    bags,
    kernels_of,
    lookups,
    sequence,
    sequences,
    sharded,
    train,
)
from tests.integration.trainer.torchrec_defects.registry import scenario
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from deltasync.core.errors import DeltasyncError
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

NEVER = 1000
# With two ranks, ids from here on have their rows on the second one.
OTHERS_FROM = 2**62
BAGS, SEQUENCES = "collided._embedding_module.embedding_bags.t", "collided._embedding_module.embeddings.t"
KINDS = {BAGS: "bags", SEQUENCES: "sequences"}


def _model(kind: str, *, evicts_every: int = NEVER) -> DistributedModelParallel:
    config = bag("t") if kind == "bags" else sequence("t")
    remapping = MCHManagedCollisionModule(
        zch_size=ROWS,
        device=torch.device("cpu"),
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=evicts_every,
    )
    collisions = ManagedCollisionCollection({"t": remapping}, [config])
    module = (
        ManagedCollisionEmbeddingBagCollection(bags(config), collisions)
        if kind == "bags"
        else ManagedCollisionEmbeddingCollection(sequences(config), collisions)
    )
    model = sharded({"collided": module}, {"t": row_wise(compute_kernel="fused")})
    _stub_resets(model, Mock())
    return model


def _stub_resets(model: nn.Module, reset: Mock) -> None:
    """FBGEMM resets momentum on a GPU only; rows are then reset by TorchRec itself, which runs here too."""
    for kernel in kernels_of(model):
        kernel.reset_embedding_weight_momentum = reset


def _spare_row() -> int:
    """Where ids of this rank go, of two, that have no row of their own yet."""
    return ROWS // 2 * (dist.get_rank() + 1) - 1


@scenario(row=27, ranks=2)
def remapped_rows_are_reported() -> None:
    for fqn, kind in KINDS.items():
        model = _model(kind)
        tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        copy = Copy(model, tracker)
        assert set(copy.update()) == {fqn}
        before = weights(model)
        train(model, t=[7, OTHERS_FROM + 7])
        tracker.step()
        reported = copy.update()
        assert reported == changed(model, before)
        assert reported[fqn] == [_spare_row()]
        copy.check(model)


@scenario(row=27, ranks=2)
def evicted_rows_are_reported() -> None:
    for fqn, kind in KINDS.items():
        model = _model(kind, evicts_every=2)
        tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        copy = Copy(model, tracker)
        copy.update()
        reset = set[int]()
        for number in range(8):
            before = weights(model)
            train(model, t=[half + 10 * number + one for one in range(6) for half in (0, OTHERS_FROM)])
            tracker.step()
            reported = copy.update()
            assert set(changed(model, before)[fqn]) <= set(reported[fqn])
            copy.check(model)
            reset |= set(reported[fqn])
        first = _spare_row() + 1 - ROWS // 2
        assert reset == set(range(first, first + ROWS // 2))  # Every row has been given to another id.


@scenario(row=27)
def rows_evicted_while_paused_are_reported() -> None:
    for fqn, kind in KINDS.items():
        model = _model(kind, evicts_every=1)
        tracker = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST))
        copy = Copy(model, tracker)
        copy.update()
        before = weights(model)
        with tracker.pause():
            model(lookups(t=[1, 2, 3]))
        tracker.step()
        assert changed(model, before)
        assert copy.update()[fqn]
        copy.check(model)


@scenario(row=27)
def evaluation_keeps_no_reader_waiting() -> None:
    for kind in KINDS.values():
        model = _model(kind, evicts_every=1)
        tracker = Tracker(model)
        train(model, t=[1, 2])
        tracker.step()
        tracker.clear()
        model.eval()
        with torch.no_grad():
            model(lookups(t=[1, 2]))
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(tracker.get_delta, timeout_seconds=1.0).result().rows


@scenario(row=27)
def rows_are_not_read_while_they_are_evicted() -> None:
    for kind in KINDS.values():
        model = _model(kind, evicts_every=1)
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


def _sort_unread(tracker: Tracker, sort: Callable[[], None]) -> None:
    _read_in_vain(tracker)
    sort()


@scenario(row=27)
def maps_are_not_read_while_they_change() -> None:
    for kind in KINDS.values():
        model = _model(kind, evicts_every=1)
        tracker = Tracker(model, TrackerOptions(id_maps=True))
        [remapping] = [module for module in model.modules() if isinstance(module, MCHManagedCollisionModule)]
        sorting = Mock(side_effect=partial(_sort_unread, tracker, remapping._sort_mch_buffers))
        with patch.object(remapping, "_sort_mch_buffers", sorting):
            _evict(model, tracker)
        sorting.assert_called()
        assert [fqn for fqn in tracker.get_delta().rows if fqn.endswith(".raw_ids")]


@scenario(row=27)
def two_trackers_see_evictions_and_leave_one_by_one() -> None:
    for fqn, kind in KINDS.items():
        model = _model(kind, evicts_every=1)
        one, other = Tracker(model), Tracker(model)
        _evict(model, one, other)
        assert ids_of(one.get_delta()) == ids_of(other.get_delta()) != {}
        one.close()
        one.clear()
        other.clear()
        before = weights(model)
        _evict(model, other)
        assert set(changed(model, before)[fqn]) <= set(ids_of(other.get_delta())[fqn])
        assert not one.get_delta().rows
        other.close()
        other.clear()
        _evict(model)
        assert not other.get_delta().rows


def _evict(model: nn.Module, *trackers: Tracker) -> None:
    """A forward that gives rows to ids never seen before."""
    model(lookups(t=torch.randint(10**12, (3,)).tolist()))
    for tracker in trackers:
        tracker.step()
