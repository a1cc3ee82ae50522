"""Rows 19, 20 and 22: what a mode gives, and tables that it is refused for."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import ids_of
from tests.integration.trainer.torchrec_defects.models import BAGS, bags, sharded, train
from tests.integration.trainer.torchrec_defects.scenarios import scenario
from torchrec.distributed.sharding_plan import data_parallel

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

T0, T1 = f"{BAGS}.t0", f"{BAGS}.t1"
OF_MOMENTUM = (TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD)


@scenario(row=20)
def modes_are_refused_at_once_where_the_optimizer_lacks_them() -> None:
    adagrad, sgd = EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_SGD
    refused = [(TrackingMode.ROWWISE_ADAGRAD, adagrad, "the fused optimizer of table .* is not row-wise Adagrad")]
    refused += [(mode, sgd, "has no momentum") for mode in OF_MOMENTUM]
    for mode, optimizer, why in refused:
        model = sharded({"bags": bags("t0")}, optimizer=optimizer)
        message = f"mode '{mode.value}': .*{why}"
        with pytest.raises(InvalidInput, match=message) as error:
            Tracker(model, TrackerOptions(mode=mode))
        assert T0 in str(error.value)
        tracker = Tracker(model)  # The refused one has left nothing behind.
        with pytest.raises(InvalidInput, match=message):
            tracker.add_consumer("another", mode)
        assert tracker.consumers == ["default"]
        train(model, t0=[1])
        tracker.step()
        assert ids_of(tracker.get_delta()) == {T0: [1]}


@scenario(row=19)
def states_are_first_values_or_the_last_momentum_or_by_how_much_it_has_grown() -> None:
    model = sharded({"bags": bags("t0")}, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    for mode in (TrackingMode.EMBEDDING, TrackingMode.MOMENTUM_LAST, TrackingMode.MOMENTUM_DIFF):
        tracker = Tracker(model, TrackerOptions(mode=mode))
        train(model, t0=[1, 2, 2])
        tracker.step()
        rows = tracker.get_delta().rows[T0]
        assert rows.values is not None
        match mode:
            case TrackingMode.MOMENTUM_LAST:
                assert rows.states is rows.values
            case TrackingMode.EMBEDDING:
                assert rows.states is rows.first is not None
            case _:
                assert rows.states is not None
                assert rows.first is not None
                assert torch.equal(rows.states, rows.values - rows.first)
        tracker.close()


@scenario(row=22)
def momentum_of_a_data_parallel_table_is_refused() -> None:
    optimizer = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    model = sharded({"bags": bags("t0", "t1")}, {"t1": data_parallel()}, optimizer=optimizer)
    for mode in OF_MOMENTUM:
        with pytest.raises(InvalidInput, match=f"table '{T1}' has no momentum in a fused optimizer; skip it"):
            Tracker(model, TrackerOptions(mode=mode))
        tracker = Tracker(model, TrackerOptions(mode=mode, fqns_to_skip=["t1"]))  # As the message says.
        train(model, t0=[2], t1=[3])
        tracker.step()
        assert ids_of(tracker.get_delta()) == {T0: [2]}
        tracker.close()
