"""Rows 4 and 24: when a lookup counts."""

from concurrent.futures import ThreadPoolExecutor

from tests.integration.trainer.torchrec_defects.copies import followed, ids_of
from tests.integration.trainer.torchrec_defects.models import BAGS, bags, lookups, sharded, train
from tests.integration.trainer.torchrec_defects.scenarios import scenario

from deltasync.trainer.tracking import Tracker

T0 = f"{BAGS}.t0"


@scenario(row=4)
def a_read_between_forward_and_backward_offers_nothing_too_early() -> None:
    model = sharded({"bags": bags("t0")})
    tracker, copy = followed(model)
    loss, _ = model(lookups(t0=[0, 1]))
    assert copy.update() == {}
    with ThreadPoolExecutor(1) as other:  # Nothing has changed yet that another thread would wait for.
        assert other.submit(copy.update).result() == {}
    loss.backward()
    tracker.step()
    assert copy.update() == {T0: [0, 1]}
    copy.check(model)


@scenario(row=24)
def pause_is_for_the_lookups_of_its_thread() -> None:
    model = sharded({"bags": bags("t0")})
    tracker = Tracker(model)
    with tracker.pause():
        with tracker.pause():
            train(model, t0=[1])
        train(model, t0=[2])
    train(model, t0=[3])
    loss, _ = model(lookups(t0=[4]))
    with tracker.pause():
        loss.backward()  # Its lookup came before.
    tracker.step()
    assert ids_of(tracker.get_delta()) == {T0: [3, 4]}
