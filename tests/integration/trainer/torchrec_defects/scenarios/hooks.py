"""Row 28: the places in TorchRec where one function can listen are shared."""

from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import ids_of
from tests.integration.trainer.torchrec_defects.models import (
    SEQUENCES,
    lookups,
    lookups_of,
    sequences,
    sharded,
    train,
)
from tests.integration.trainer.torchrec_defects.scenarios import scenario
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.model_tracker.types import TrackingMode as TheirMode

from deltasync.base.errors import Contradiction
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

S = f"{SEQUENCES}.s"
# Its MOMENTUM_LAST does not run on a CPU.
THEIR_MODES = (TheirMode.ID_ONLY, TheirMode.EMBEDDING, TheirMode.MOMENTUM_DIFF, TheirMode.ROWWISE_ADAGRAD)


def _model() -> DistributedModelParallel:
    """TorchRec's tracker wants a dense parameter."""
    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    return sharded({"sequences": sequences("s")}, optimizer=optimizer, dense=True)


def _theirs(model: DistributedModelParallel, mode: TheirMode, *, auto_compact: bool) -> Any:
    return model.init_torchrec_delta_tracker(DeltaTrackerConfig(tracking_mode=mode, auto_compact=auto_compact))


@scenario(row=28)
def torchrecs_own_tracker_works_beside_ours() -> None:
    for mode in THEIR_MODES:
        for auto_compact in (False, True):
            model = _model()
            theirs = _theirs(model, mode, auto_compact=auto_compact)
            ours = Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING))
            for ids in ([1, 2], [2, 7]):
                train(model, s=ids)
                ours.step()
            model(lookups(s=[1]))  # It is told of a batch by the forward of the next one.
            assert {fqn: sorted(ids.tolist()) for fqn, ids in theirs.get_unique_ids().items()} == {S: [1, 2, 7]}
            assert ids_of(ours.get_delta()) == {S: [1, 2, 7]}


@scenario(row=28)
def a_function_registered_before_is_still_called() -> None:
    model, calls = _model(), list[Any]()
    (lookup,) = lookups_of(model)
    lookup.register_optim_state_tracker_fn(lambda *arguments: calls.append(arguments))
    tracker = Tracker(model)
    train(model, s=[1, 2])
    tracker.step()
    assert [features.values().tolist() for features, _, _ in calls] == [[1, 2]]
    assert ids_of(tracker.get_delta()) == {S: [1, 2]}
    tracker.close()
    train(model, s=[3])
    assert len(calls) == 2


@scenario(row=28)
def a_function_registered_later_is_detected() -> None:
    for mode in (TheirMode.MOMENTUM_DIFF, TheirMode.ROWWISE_ADAGRAD):
        model = _model()
        tracker = Tracker(model)
        train(model, s=[1])
        tracker.step()
        _theirs(model, mode, auto_compact=False)
        with pytest.raises(Contradiction, match=r"lookups of module 'sequences': another function"):
            tracker.step()
        tracker.close()  # And then in the order that the message asks for.
        tracker = Tracker(model)
        train(model, s=[2])
        tracker.step()
        assert ids_of(tracker.get_delta()) == {S: [2]}


@scenario(row=28, ranks=2)
def a_function_at_the_output_dist_is_detected() -> None:
    model = _model()
    tracker = Tracker(model)
    _theirs(model, TheirMode.ID_ONLY, auto_compact=True)
    with pytest.raises(Contradiction, match=r"output dist of module 'sequences': another function"):
        tracker.step()
