"""Rows 6 to 8 and 10: reads, acknowledgements, and consumers who come, go or never read."""

import gc

import pytest
import torch
from tests.integration.trainer.torchrec_defects.copies import ids_of
from tests.integration.trainer.torchrec_defects.models import BAGS, ROWS, bags, sharded, train
from tests.integration.trainer.torchrec_defects.scenarios import scenario

from deltasync.base.errors import NotFound
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

T0, T1 = f"{BAGS}.t0", f"{BAGS}.t1"


@scenario(row=6)
def without_a_name_the_only_consumer_is_meant() -> None:
    model = sharded({"bags": bags("t0")})
    tracker = Tracker(model, TrackerOptions(consumers=["publisher"]))
    train(model, t0=[2])
    tracker.step()
    delta = tracker.get_delta()
    assert delta.consumer == "publisher"
    assert ids_of(delta) == ids_of(tracker.get_delta("publisher")) == {T0: [2]}


@scenario(row=6)
def an_unknown_consumer_is_an_error_that_names_the_others() -> None:
    tracker = Tracker(sharded({"bags": bags("t0")}), TrackerOptions(consumers=["a", "b"]))
    for read in (tracker.get_delta, tracker.get_delta_ids, tracker.resync, tracker.remove_consumer):
        with pytest.raises(NotFound, match=r"no consumer 'c'; there are: a, b"):
            read("c")
    for read in (tracker.get_delta, tracker.get_delta_ids, tracker.resync):
        with pytest.raises(NotFound, match=r"no consumer 'default'; there are: a, b"):
            read()


@scenario(row=10)
def a_consumer_who_never_reads_costs_nothing() -> None:
    for mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING):
        _train_for_long(TrackerOptions(consumers=["fast", "never"], mode=mode))


def _train_for_long(options: TrackerOptions) -> None:
    model = sharded({"bags": bags("t0")})
    tracker = Tracker(model, options)
    ids = torch.randint(ROWS, (200, 200)).tolist()
    held, alive = list[int](), list[int]()
    for number, batch in enumerate(ids, 1):
        train(model, t0=batch)
        tracker.step()
        if number % 10 == 0:
            tracker.acknowledge(tracker.get_delta("fast"))
        held.append(tracker.nbytes)
        if number in (20, 200):
            alive.append(_bytes_of_tensors())
    assert held[19] == held[199]
    assert max(held) <= held[19]
    assert alive[0] == alive[1]  # What the tracker says, checked by what the process holds.
    assert ids_of(tracker.get_delta("never")) == {T0: sorted({one for batch in ids for one in batch})}


def _bytes_of_tensors() -> int:
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum({one.data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
