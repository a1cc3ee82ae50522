"""Metrics of a rank: what `DeltaSync.metrics` returns, and their export to Prometheus."""

import subprocess
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.support.documents import ROOT
from tests.support.ports import free_port
from tests.support.server import RunningService
from torch import nn

from deltasync.base.errors import InvalidInput
from deltasync.trainer.prometheus import TrainerCollector, serve_metrics
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.sync_options import COUNTERS, GAUGES

WAIT = 20.0


@pytest.fixture
def sync(running: RunningService) -> Iterator[DeltaSync]:
    """Publishes with each step a model that changes with none."""
    sync = DeltaSync(nn.Linear(4, 5), SyncOptions(service=running.grpc, model="clicks", publish_every=1))
    sync.flush(WAIT)
    yield sync
    sync.abort()


def test_promtool_accepts_a_trainers_metrics(sync: DeltaSync, tool: Callable[[str], str]) -> None:
    registry = CollectorRegistry()
    registry.register(TrainerCollector(sync, "clicks", 3))
    written = generate_latest(registry).decode()
    assert COUNTERS.keys() | GAUGES.keys() == sync.metrics().keys()
    assert 'deltasync_trainer_cuts_total{model="clicks",rank="3"} 1.0' in written
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=written, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_readme_names_all_numbers(sync: DeltaSync) -> None:
    text = (ROOT / "trainer/README.md").read_text()
    assert [name for name in sync.metrics() if f"`{name}`" not in text] == []


def test_each_rank_answers_on_a_port_of_its_own(sync: DeltaSync) -> None:
    port = free_port()
    serve_metrics(sync, "clicks", 1, f"127.0.0.1:{port - 1}", 1)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    written = opener.open(f"http://127.0.0.1:{port}/metrics", timeout=WAIT).read().decode()
    assert 'deltasync_trainer_version{model="clicks",rank="1"} 1.0' in written
    assert "process_resident_memory_bytes" in written
    with pytest.raises(InvalidInput, match=r"of rank 1: .*in use"):
        serve_metrics(sync, "clicks", 1, f"127.0.0.1:{port - 1}", 1)
    for wrong in ("9400", "host:", "host:70000", ":9400"):
        with pytest.raises(InvalidInput, match="expected HOST:PORT"):
            serve_metrics(sync, "clicks", 0, wrong)
