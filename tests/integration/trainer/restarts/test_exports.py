"""A trainer begins again from a kept version, and the service continues from it."""

import re
from pathlib import Path

import pytest
import torch
from tests.integration.trainer.following import WAIT, expect
from tests.integration.trainer.restarts.export_ranks import RUNS
from tests.support.command import deltasync
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks
from torch import nn

from deltasync.client import Admin, Endpoint
from deltasync.trainer import load_export
from deltasync.trainer.sync import DeltaSync, SyncOptions


def joined(service: ServiceProcess, model: str) -> list[str]:
    """What the service said of each rank of a model that joined."""
    events = service.get_json("/events")
    ours = [each for each in events if (each["event"], each["subject"].get("model")) == ("rank_joined", model)]
    return [each["text"] for each in ours]


@pytest.mark.parametrize("runs", [["columns-to-rows"], pytest.param(list(RUNS), marks=pytest.mark.nightly)])
def test_ranks_begin_again_under_another_plan(service: ServiceProcess, tmp_path: Path, runs: list[str]) -> None:
    exports = tmp_path / "exports"
    exports.mkdir()
    script = str(Path(__file__).with_name("export_ranks.py"))
    run_ranks(script, service.grpc, service.http, str(service.data_dir / "checkpoints"), str(exports), *runs)
    for model in runs:
        first, later = "nothing is published yet", r"the run holds version \d+, and gets the ids of later rows"
        assert {re.sub(later, "later", text) for text in joined(service, model)} == {first, "later"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.over = nn.Embedding(500, 4), nn.Linear(4, 1)

    def change(self, *ids: int) -> None:
        self.words.weight.data[list(ids)] += 1


def test_only_rows_that_were_published_later_and_new_changes_are_published(
    service: ServiceProcess, tmp_path: Path
) -> None:
    options = SyncOptions(service=service.grpc, model="clicks", publish_every=1)
    model = Model()
    sync = DeltaSync(model, options)
    sync.flush(WAIT)
    Admin(Endpoint(address=service.http, token="secret")).keep_version("clicks", "good")  # noqa: S106
    kept = {name: each.clone() for name, each in model.state_dict().items()}
    model.change(1, 2)
    sync.step(event_time_unix_ns=5)
    sync.delete("words", torch.tensor([3]))
    sync.step()
    newest = sync.close(WAIT)

    file, at = tmp_path / "good", f"{service.data_dir}/checkpoints"
    code, _, err = deltasync("export", "clicks", str(file), "--at", at, "--version", "good")
    assert code == 0, err
    again = Model()
    state = load_export(again, file)
    assert all(torch.equal(each, kept[name]) for name, each in again.state_dict().items())
    assert state["version"] < newest.number
    resumed = DeltaSync(again, options)
    resumed.load_state_dict([state])
    again.change(2, 9)
    resumed.step()
    expect(service, resumed, again)
    assert resumed.stats.rows == 4, "1, 2 and 3, which were published later, and 2 and 9"
    assert resumed.stats.published_step == 1
    reason = f"the run holds version {state['version']}, and gets the ids of later rows"
    assert joined(service, "clicks")[-1] == reason
    resumed.abort()
