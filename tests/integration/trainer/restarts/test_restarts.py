"""A trainer of one rank and a service process: one of them comes back with less than the other has."""

import shutil
from pathlib import Path
from typing import Any

import torch
from tests.integration.trainer.following import WAIT, expect
from tests.support.process import ServiceProcess
from tests.unit.trainer.tracking.test_id_maps import RAW_IDS, fill, model_of, sorted_ids
from torch import nn

from deltasync.core.tables import FREE_ID
from deltasync.trainer.sync import DeltaSync, SyncOptions


def delta_sync(service: ServiceProcess, model: nn.Module) -> DeltaSync:
    return DeltaSync(model, SyncOptions(service=service.grpc, model="clicks", publish_every=1))


def copy_of(service: ServiceProcess, folder: Path) -> Path:
    service.terminate()
    copied = shutil.copytree(service.data_dir, folder / "copy")
    service.start()
    return copied


def put_back(service: ServiceProcess, copied: Path) -> None:
    service.kill()
    shutil.rmtree(service.data_dir)
    shutil.copytree(copied, service.data_dir)
    service.start()


class Table(nn.Module):
    def __init__(self, rows: int = 500) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.zeros(rows, 4))

    def change(self, *ids: int) -> None:
        self.t.data[list(ids)] += 1


def test_a_service_put_back_to_an_older_copy_is_given_what_it_lacks(
    service: ServiceProcess, tmp_path: Path
) -> None:
    model = Table()
    sync = delta_sync(service, model)
    sync.flush(WAIT)
    model.change(1, 2)
    sync.step()
    sync.flush(WAIT)
    copied = copy_of(service, tmp_path)
    for row in range(10, 20):
        model.change(row)
        sync.step()
    lost = sync.flush(WAIT)
    put_back(service, copied)
    before = sync.stats.rows
    model.change(30)
    sync.step()
    again = sync.flush(WAIT)
    assert sync.stats.rows - before == 11
    assert again.number < lost.number
    expect(service, sync, model)
    sync.abort()


def test_a_run_whose_version_is_lost_continues_from_an_earlier_one(
    service: ServiceProcess, tmp_path: Path
) -> None:
    model = Table()
    sync = delta_sync(service, model)
    sync.flush(WAIT)
    copied = copy_of(service, tmp_path)
    model.change(3, 4)
    sync.step()
    sync.flush(WAIT)
    state, weights = sync.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
    model.change(5)
    sync.step()
    sync.flush(WAIT)
    sync.abort()
    put_back(service, copied)
    again = Table()
    again.load_state_dict(weights)
    resumed = delta_sync(service, again)
    resumed.load_state_dict([state])
    resumed.flush(WAIT)
    assert resumed.stats.rows == 2
    expect(service, resumed, again)
    resumed.abort()


def test_maps_of_ids_are_again_as_in_the_checkpoint(service: ServiceProcess) -> None:
    collisions = sorted_ids()
    model = model_of(collisions)
    fill(collisions, {10: 3, 20: 0})
    sync = delta_sync(service, model)
    sync.flush(WAIT)
    state = sync.state_dict()
    fill(collisions, {10: 3, 30: 0, 40: 5})
    sync.step()
    sync.flush(WAIT)
    sync.abort()
    collisions = sorted_ids()
    model = model_of(collisions)
    fill(collisions, {10: 3, 20: 0})
    resumed = delta_sync(service, model)
    resumed.load_state_dict([state])
    target = expect(service, resumed, nn.Module())
    assert target.tables[RAW_IDS][:, 0].tolist() == [20 ^ FREE_ID, 0, 0, 10 ^ FREE_ID, 0, 0, 0, 0]
    assert resumed.stats.rows < len(target.tables[RAW_IDS]) + 8
    resumed.abort()


class Grown(Table):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(7, 4))


def test_tables_that_came_after_the_checkpoint(service: ServiceProcess) -> None:
    """They stay where the run does not have them, and are published whole where it has them anew."""
    model = Table()
    sync = delta_sync(service, model)
    sync.flush(WAIT)
    state = sync.state_dict()
    sync.abort()
    later: Any = Grown()
    sync = delta_sync(service, later)
    sync.load_state_dict([state])
    later.change(8)
    later.more.data[2] = 5
    sync.step()
    sync.flush(WAIT)
    sync.abort()
    for again, rows in ((Table(), 1), (Grown(), 1 + 7)):
        resumed = delta_sync(service, again)
        resumed.load_state_dict([state])
        again.change(9)
        resumed.step()
        resumed.flush(WAIT)
        target = expect(service, resumed, again)
        assert resumed.stats.rows == rows + 1, "those that were published since, and its own"
        assert target.tables["more"][2].tolist() == [5 if rows == 1 else 1] * 4
        resumed.abort()


def test_a_trainer_that_has_published_already_goes_back_to_a_checkpoint(service: ServiceProcess) -> None:
    """As after a loss that has exploded. What this very run has published since is published as it was."""
    model = Table()
    sync = delta_sync(service, model)
    sync.flush(WAIT)
    state, weights = sync.state_dict(), {name: each.clone() for name, each in model.state_dict().items()}
    model.change(5, 6)
    sync.step()
    sync.flush(WAIT)
    before = sync.stats.rows
    model.load_state_dict(weights)
    sync.load_state_dict([state])
    model.change(9)
    sync.step()
    expect(service, sync, model)
    assert sync.stats.rows - before == 3
    sync.abort()
