"""DeltaSync on one rank against a real service that fails in all the ways services do."""

import copy
import shutil
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.integration.trainer.following import assert_equal, published_rows, subscriber
from tests.support.damage import change_value, entries
from tests.support.process import ADMIN_TOKEN, ServiceProcess
from tests.support.waiting import wait_for
from tests.unit.trainer.tracking.test_id_maps import RAW_IDS, fill, model_of, sorted_ids
from torch import nn

from deltasync.base.errors import InvalidInput, NotFound, ServiceUnavailable
from deltasync.client import Admin, CallbackTarget, Endpoint, NumpyTarget, Release, Subscriber, SubscriberOptions
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.tables import FREE_ID
from deltasync.trainer.sync import DeltaSync, SyncOptions


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def delta_sync(service: ServiceProcess, model: nn.Module, publish_every: int = 1) -> DeltaSync:
    return DeltaSync(model, SyncOptions(service=service.grpc, model="clicks", publish_every=publish_every))


def test_every_step_reaches_the_replica(service: ServiceProcess) -> None:
    model, target = linear(), NumpyTarget()
    with delta_sync(service, model, publish_every=2) as sync, subscriber(service, target) as replica:
        for _ in range(5):
            change(model)
            sync.step()
        replica.wait_for(sync.flush().number, 30)
        assert_equal(target, model)
        before = sync.flush()
        assert sync.flush() == before, "nothing changed, nothing is published"


def test_two_of_them_publish_parts_of_one_module_as_two_models(service: ServiceProcess) -> None:
    Admin(Endpoint(service.http, ADMIN_TOKEN)).create_consumer("rankers", "ranking", Policy())
    module, targets = nn.ModuleDict({"retrieval": linear(), "ranking": linear()}), [NumpyTarget(), NumpyTarget()]
    followed = [SubscriberOptions(service=service.grpc, consumer=name) for name in ("predictors", "rankers")]
    retrieval = SyncOptions(service=service.grpc, model="clicks", publish_every=1, fqns_to_skip=["ranking"])
    ranking = SyncOptions(service=service.grpc, model="ranking", publish_every=2, fqns_to_skip=["retrieval"])
    with (
        DeltaSync(module, retrieval) as first,
        DeltaSync(module, ranking) as second,
        Subscriber(followed[0], targets[0]) as predictor,
        Subscriber(followed[1], targets[1]) as ranker,
    ):
        for _ in range(3):
            change(module)
            first.step()
            second.step()
        predictor.wait_for(first.flush(), 30)
        ranker.wait_for(second.flush(), 30)
        for target, name in zip(targets, ("retrieval", "ranking"), strict=True):
            assert {each.partition(".")[0] for each in target.tables} == {name}
            assert_equal(target, nn.ModuleDict({name: module[name]}))


class Arrival:
    """Stands in for a GPU's event: what was launched arrives when the test says so."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # The thread that trains waits for counts.
            assert self._over.wait(60)


def as_on_a_gpu(sync: DeltaSync, over: threading.Event) -> None:
    sync.tracker.on_gpu = True
    sync.tracker._gate.arrival = lambda: Arrival(over)  # type: ignore[method-assign,assignment,return-value]


def counted_ahead(sync: DeltaSync, model: nn.Module) -> Position:
    """Publish until a count has been asked for that the next cut may use: one of a first cut may not be."""
    sync.step()
    sync.flush()
    change(model)
    sync.step()
    return sync.flush()


def test_rows_on_their_way_from_a_gpu_are_published_once_they_have_arrived(service: ServiceProcess) -> None:
    model, target, over = linear(), NumpyTarget(), threading.Event()
    with delta_sync(service, model) as sync, subscriber(service, target) as replica:
        as_on_a_gpu(sync, over)
        sealed, absorbed = counted_ahead(sync, model), sync.stats.absorbed
        change(model)
        launched = copy.deepcopy(model)
        sync.step()
        assert sync.stats.absorbed == absorbed
        change(model)
        sync.step()
        assert sync.stats.absorbed == absorbed + 1, "that of the step before is still on its way"
        over.set()
        replica.wait_for(sealed.number + 1, 30)  # Without a further step.
        assert_equal(target, launched)
        replica.wait_for(sync.flush().number, 30)
        assert_equal(target, model)


def test_what_is_on_its_way_when_publishing_is_given_up_is_dropped(service: ServiceProcess) -> None:
    model, over = linear(), threading.Event()
    sync = delta_sync(service, model)
    as_on_a_gpu(sync, over)
    sealed = counted_ahead(sync, model)
    change(model)
    sync.step()
    sync.abort()
    over.set()
    assert service.get_json("/consumers/predictors")["head"] == sealed.number


def test_a_service_that_is_down_makes_no_step_wait(service: ServiceProcess) -> None:
    model, target = linear(), NumpyTarget()
    with delta_sync(service, model) as sync, subscriber(service, target) as replica:
        sync.flush()
        service.kill()
        for _ in range(20):
            change(model)
            sync.step()
        assert sync.stats.absorbed >= 19
        with pytest.raises(ServiceUnavailable, match=r"did not seal the cut of step [0-9]+ in time"):
            sync.flush(timeout_seconds=0.01)
        assert sync.connection
        wait_for(lambda: sync.connection and not sync.connection.connected)
        assert sync.connection.last_error
        service.start()
        replica.wait_for(sync.flush().number, 30)
        assert_equal(target, model)
        assert sync.connection.connected
        # The cut that waited, and once what has changed since: not what changed in each of the steps.
        assert 0 < published_rows(service) <= 2 * sum(each["rows"] for each in service.get_json("/tables"))


def test_an_empty_service_in_its_place_is_given_everything(service: ServiceProcess) -> None:
    model, target = linear(), NumpyTarget()
    with delta_sync(service, model) as sync, subscriber(service, target) as replica:
        change(model)
        sync.step()
        first = sync.flush()
        replica.wait_for(first.number, 30)
        service.kill()
        shutil.rmtree(service.data_dir)
        service.start()
        with torch.no_grad():
            model.bias.zero_()
        sync.step()
        second = sync.flush()
        assert second.history != first.history
        assert replica.wait_for(second, 30) == second
        assert_equal(target, model)


def test_rows_that_are_free_again_are_free_after_everything_was_asked_for(service: ServiceProcess) -> None:
    collisions = sorted_ids()
    model, target = model_of(collisions), NumpyTarget()
    fill(collisions, {10: 3, 20: 0})
    with delta_sync(service, model) as sync, subscriber(service, target) as replica:
        replica.wait_for(sync.flush().number, 30)
        fill(collisions, {10: 3})
        sync.tracker.resync()
        replica.wait_for(sync.flush().number, 30)
        with target.reading() as reading:
            assert reading.tables[RAW_IDS][:, 0].tolist() == [0, 0, 0, 10 ^ FREE_ID, 0, 0, 0, 0]
        assert sync.flush() == sync.flush()


def test_a_restored_run_publishes_only_what_changed(service: ServiceProcess) -> None:
    model = nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 2))
    with delta_sync(service, model) as sync:
        change(model)
        sync.step()
    state = sync.state_dict()
    rows = sync.stats.rows
    restored = delta_sync(service, model)
    restored.load_state_dict([state])
    with restored:
        restored.flush()
        assert restored.stats.rows == 0, "nothing has changed since the checkpoint"
    with delta_sync(service, model) as other:
        other.flush()
    assert other.stats.rows == rows, "a run that cannot show what it holds publishes everything"


def test_one_state_is_not_taken_for_those_of_all_ranks(service: ServiceProcess) -> None:
    sync = delta_sync(service, linear())
    with pytest.raises(InvalidInput, match="expected a list with the states of all ranks, got one state"):
        sync.load_state_dict(sync.state_dict())  # type: ignore[arg-type]
    sync.abort()


def test_the_newest_event_of_all_steps_goes_with_a_cut(service: ServiceProcess) -> None:
    model, target = linear(), NumpyTarget()
    with delta_sync(service, model, publish_every=3) as sync, subscriber(service, target) as replica:
        replica.wait_for(sync.flush(), 30)
        assert replica.event_time_unix_ns is None, "nothing was trained on yet"
        for event_time in (20, 10, None):  # One cut, after the third.
            change(model)
            sync.step(event_time)
        replica.wait_for(sync.flush(), 30)
        with target.reading() as reading:
            assert (reading.position, reading.event_time_unix_ns) == (replica.held, 20)
            assert (target.position, target.event_time_unix_ns) == (replica.held, 20)
        with pytest.raises(InvalidInput, match=r"event_time_unix_ns: 1\.5, expected whole nanoseconds since 1970"):
            sync.step(1.5)  # type: ignore[arg-type]
        state = sync.state_dict()
    with delta_sync(service, model) as sync, subscriber(service, target) as replica:
        sync.load_state_dict([state])
        change(model)
        replica.wait_for(sync.flush(), 30)
        assert replica.event_time_unix_ns == 20, "a run from a checkpoint knows of what it was trained on"


class Shop(nn.Module):
    def __init__(self, users: int, *, items: int = 0) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(users, 4)
        self.over = nn.Linear(4, 2)
        if items:
            self.item = nn.EmbeddingBag(items, 4)
            self.norm = nn.BatchNorm1d(4)


def test_a_larger_model_from_a_checkpoint_publishes_what_is_new(service: ServiceProcess) -> None:
    """A table, a column of buffers and rows more."""
    target, received = NumpyTarget(), list[int]()

    def take(release: Release) -> None:
        target.apply(release)
        received.append(sum(map(len, release.rows)))

    def follower() -> Subscriber:
        options = SubscriberOptions(
            service=service.grpc, consumer="predictors", replica="p1", held=target.position
        )
        return Subscriber(options, CallbackTarget(take))

    before, after = Shop(10), Shop(25, items=7)
    with delta_sync(service, before) as sync, follower() as replica:
        replica.wait_for(sync.flush(), 30)
        state = sync.state_dict()
    with torch.no_grad():
        after.over.load_state_dict(before.over.state_dict())
        after.user.weight[:10] = before.user.weight
    received.clear()
    with delta_sync(service, after) as sync, follower() as replica:
        sync.load_state_dict([state])
        with torch.no_grad():
            after.user.weight[3] += 1
        sync.tracker.mark("user", torch.tensor([3]))
        replica.wait_for(sync.flush(), 30)
    new = sum(rows.numel() // rows.shape[-1] if rows.dim() else 1 for rows in after.norm.state_dict().values())
    assert sum(received) == 1 + 15 + 7 + new
    with target.reading() as reading:
        for name, tensor in after.state_dict().items():
            table = reading.tables[name.removesuffix(".weight") if name[:4] in ("user", "item") else name]
            np.testing.assert_array_equal(table.reshape(tensor.shape), tensor.numpy())


SKIPS = ["item", "norm"]
KEPT = {"user", "over.weight", "over.bias"}


def without(service: ServiceProcess, model: nn.Module, *fqns_to_skip: str) -> DeltaSync:
    options = SyncOptions(service=service.grpc, model="clicks", fqns_to_skip=fqns_to_skip, verify=True)
    return DeltaSync(model, options)


def test_tables_that_are_left_out_are_never_published(service: ServiceProcess) -> None:
    model, target = Shop(10, items=7), NumpyTarget()
    with without(service, model, *SKIPS) as sync, subscriber(service, target) as replica:
        first = sync.flush()
        with torch.no_grad():
            model.item.weight.add_(1.0)
        model.norm(torch.randn(3, 4))
        assert sync.flush() == first, "nothing that is published has changed"
        assert {each["table"] for each in service.get_json("/tables")} == KEPT
        with pytest.raises(NotFound, match=r"no table 'item'; there are: user, over.weight, over.bias"):
            sync.delete("item", torch.tensor([1]))
        change(model)
        replica.wait_for(sync.flush(), 30)
        assert target.tables.keys() == KEPT


def test_a_run_from_a_checkpoint_may_leave_out_others(service: ServiceProcess) -> None:
    """Whatever the service has got since: tables that are taken in again are published, those left out stay."""
    model, target = Shop(10, items=7), NumpyTarget()
    with without(service, model, *SKIPS) as sync:
        sync.flush()
        state = sync.state_dict()
    with without(service, model) as sync, subscriber(service, target) as replica:
        sync.load_state_dict([state])
        replica.wait_for(sync.flush(), 30)
        item = model.item.weight.detach().clone()
        np.testing.assert_array_equal(target.tables["item"], item)
    with without(service, model, *SKIPS) as sync, subscriber(service, target) as replica:
        sync.load_state_dict([state])
        change(model)
        replica.wait_for(sync.flush(), 30)
        np.testing.assert_array_equal(target.tables["user"], model.user.weight.detach())
        np.testing.assert_array_equal(target.tables["item"], item)


def lose_newest_version(service: ServiceProcess) -> None:
    newest = max(key for key in entries(service.data_dir / "log", "records") if key.startswith(b"cuts/"))
    change_value(service.data_dir / "log", "records", newest, 200)


def lose_checkpoints(service: ServiceProcess) -> None:
    for path in (service.data_dir / "checkpoints" / "clicks" / "data").iterdir():
        path.write_bytes(bytes(100))


@pytest.mark.parametrize(("lose", "rows"), [(lose_newest_version, 2), (lose_checkpoints, 30)])
def test_what_log_and_checkpoints_have_lost_is_published_again(
    service: ServiceProcess, lose: Callable[[ServiceProcess], None], rows: int
) -> None:
    """Only that, where the run knows which rows came after what is left."""
    model, target = nn.Linear(5, 30), NumpyTarget()
    with delta_sync(service, model) as sync:
        sync.flush()
        for row in range(3):
            with torch.no_grad():
                model.weight[row].add_(1.0)
            sync.step()
            sync.flush()
            Admin(Endpoint(service.http, ADMIN_TOKEN)).make_checkpoint("clicks") if row < 2 else None
        service.terminate()
        lose(service)
        service.start()
        with torch.no_grad():
            model.weight[9].add_(1.0)
        sync.step()
        with subscriber(service, target) as replica:
            replica.wait_for(sync.flush(), 30)
        assert_equal(target, model)
        assert published_rows(service) == rows
