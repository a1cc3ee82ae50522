"""Ranks of a plain trainer, of which one has heard that a step is sealed, and the service then lost it."""

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.soak.lineage import TrainingRun, write_runs
from tests.soak.rank import PlainRank, journal_file, runs_file
from tests.soak.training import FIRST_TABLES, Training, spec_of
from tests.support.fleet import Trainer
from tests.support.server import RunningService
from tests.support.state import rows_of

from deltasync.base.errors import Contradiction
from deltasync.client import Endpoint, Policy

MODEL = "clicks"


@pytest.fixture
def run(tmp_path: Path) -> TrainingRun:
    made = TrainingRun(
        number=0, id="r", started_unix_ns=time.time_ns(), first_step=1, ranks=2, tables=FIRST_TABLES
    )
    write_runs(runs_file(tmp_path, MODEL), [made])
    return made


@contextmanager
def ranks(folder: Path, service: RunningService) -> Iterator[list[PlainRank]]:
    with ExitStack() as stack:
        each = [PlainRank(folder, MODEL, 0, rank, Endpoint(service.grpc)) for rank in range(2)]
        for rank in each:
            stack.enter_context(closing(rank))
        yield each


def train_until(step: int, pair: Sequence[PlainRank]) -> None:
    def train(rank: PlainRank) -> None:
        while rank.step < step:
            rank.train()

    with ThreadPoolExecutor() as pool:
        list(pool.map(train, pair))


def test_who_has_not_heard_goes_on_with_the_others(tmp_path: Path, run: TrainingRun) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    with RunningService(data) as service, ranks(tmp_path, service) as pair:
        train_until(2, pair)
    shutil.copytree(data, copy)
    with RunningService(data) as service, ranks(tmp_path, service) as pair:
        train_until(3, pair)
    journal = journal_file(tmp_path, MODEL, 0, 0)  # It was killed before it wrote that down.
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    shutil.rmtree(data)
    copy.rename(data)
    with RunningService(data, policies={"probes": Policy()}) as service, ranks(tmp_path, service) as pair:
        assert [rank.step for rank in pair] == [2, 3]
        train_until(5, pair)
        served = rows_of(service)
    trained = Training(MODEL, [run])
    trained.repeat(5, {})
    for name, rows in trained.tables.rows.items():
        np.testing.assert_array_equal(served[name], rows)


def test_who_is_refused_whatever_it_publishes_ends(tmp_path: Path, run: TrainingRun) -> None:
    tables = [spec_of(name, rows) for name, rows in run.tables.items()]
    with RunningService(tmp_path / "data") as service, ranks(tmp_path, service) as pair:
        train_until(1, pair)
        with Trainer(service.grpc, tables, run="later", started=run.started_unix_ns + 1) as later:
            later.publish_all()
            with pytest.raises(Contradiction, match="later"):
                train_until(99, pair[:1])
