"""One rank of a plain trainer: no TorchRec, no process group; what it does, `training` says.

python -m tests.soak.rank --service localhost:50051 --model pair --run 0 --rank 0 --folder /tmp/soak
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from tests.soak.journal import Journal, read_journal, stop_on_signals
from tests.soak.lineage import TrainingRun, read_runs
from tests.soak.training import TrainedTables, Training, Update, spec_of

from deltasync.base.errors import Contradiction, Damaged, DeltasyncError, InvalidInput
from deltasync.base.logs import log_to_stderr
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Endpoint, Part, Position, Publisher, PublisherOptions, ResyncRequired, RowBatch, Shard
from deltasync.core.rows import Ids

logger = logging.getLogger(__name__)

# Ranks come apart by a step each time that the service loses one; who is refused more often has another reason.
_MOST_LEFT = 20

# Less than the service waits before an earlier run may follow a later one whose ranks have gone.
_PATIENCE_SECONDS = 20.0


def runs_file(folder: Path, model: str) -> Path:
    return folder / f"{model}.runs.json"


def stop_file(folder: Path, model: str) -> Path:
    """Where the step is after which the ranks of a model end, once it is known."""
    return folder / f"{model}.stop"


def poison_file(folder: Path, model: str) -> Path:
    """What asks the first rank of a model to publish rows of the number in it; gone when they were refused."""
    return folder / f"{model}.poison"


def journal_file(folder: Path, model: str, run: int, rank: int) -> Path:
    return folder / f"{model}-{run}-{rank}.jsonl"


def asked_of(folder: Path, model: str, run: TrainingRun) -> dict[tuple[int, int], dict[str, Ids]]:
    """The rows that operators have had deleted, by number of the run and step."""
    found = {}
    for line in read_journal(journal_file(folder, model, run.number, 0)):
        if "deletes" in line:
            rows = {name: np.array(ids, np.int64) for name, ids in line["deletes"].items()}
            found[run.number, line["step"]] = rows
    return found


def shards_of(run: TrainingRun, rank: int) -> list[Shard]:
    """A rank's share of each table: as many rows as the others have, but for the last."""
    shards = []
    for name, rows in run.tables.items():
        first, end = rows * rank // run.ranks, rows * (rank + 1) // run.ranks
        spec = spec_of(name, rows)
        shards.append(Shard(spec, first, end - first, 0, spec.dim))
    return shards


def rows_of_update(shard: Shard, update: Update) -> list[RowBatch]:
    """What of an update is a shard's."""
    ours, gone = _inside(shard, update.ids), _inside(shard, update.deleted)
    live = RowBatch(shard, update.ids[ours], update.values[ours])
    return [each for each in (live, RowBatch.deletes(shard, update.deleted[gone])) if len(each)]


def some_rows(shard: Shard, tables: TrainedTables, ids: Ids) -> list[RowBatch]:
    """Those of some rows of a table that are a shard's, as they are now."""
    ids, name = ids[_inside(shard, ids)], shard.table.name
    live, gone = ids[tables.there[name][ids]], ids[~tables.there[name][ids]]
    batches = RowBatch(shard, live, tables.rows[name][live]), RowBatch.deletes(shard, gone)
    return [each for each in batches if len(each)]


def all_rows(shard: Shard, tables: TrainedTables) -> list[RowBatch]:
    """All rows of a shard that are there."""
    name = shard.table.name
    there = np.flatnonzero(tables.there[name])
    ids = there[_inside(shard, there)]
    return [RowBatch(shard, ids, tables.rows[name][ids])] if len(ids) else []


def _bytes(rows: list[RowBatch]) -> int:
    return sum(each.nbytes for each in rows)


def _inside(shard: Shard, ids: Ids) -> slice:
    return slice(*np.searchsorted(ids, [shard.row_offset, shard.row_offset + shard.rows]).tolist())


class PlainRank:
    """A rank, from where its journal ends."""

    def __init__(self, folder: Path, model: str, run: int, rank: int, service: Endpoint) -> None:
        self.folder, self.model = folder, model
        runs = read_runs(runs_file(folder, model))[: run + 1]
        self.run, self.rank = runs[-1], rank
        file = journal_file(folder, model, run, rank)
        lines = [line for line in read_journal(file) if "version" in line]
        self._journal = Journal(file)
        held = _position(lines[-1]) if lines else self.run.held
        self.step = lines[-1]["step"] if lines else self.run.first_step - 1
        self._sealed_step = self.step
        self._left: list[tuple[str, Ids]] = []  # What the steps since then have changed.
        self._training = Training(model, runs)
        # What an operator has asked for at a step that was never acknowledged is done again with that step.
        self._asked = {key: rows for each in runs for key, rows in asked_of(folder, model, each).items()}
        self._training.repeat(self.step, self._asked)
        self._numbers = {line["step"]: line["numbers"] for line in read_journal(file) if "deletes" in line}
        self._shards = shards_of(self.run, rank)
        options = PublisherOptions(
            service=service,
            model=model,
            run=self.run.id,
            run_started_unix_ns=self.run.started_unix_ns,
            rank=rank,
            world_size=self.run.ranks,
            continues=held,
            start_over=not held.number,  # After a rollback, one may begin before the first version.
            takes_deletes=self.run.ranks == 1,  # Others would have to agree on the step.
        )
        self._publisher = Publisher(options, [shard.table for shard in self._shards], self._shards)

    def train(self) -> None:
        """Do the next step, publish it, and write down which version it was.

        Where the other ranks have gone on to a later step, the next step is published with what this one changed.
        """
        self.step += 1
        asked, numbers = self._meet()
        updates = self._training.step(self.run, self.step, asked)
        rows = [each for shard in self._shards for each in rows_of_update(shard, updates[shard.table.name])]
        if self._left:  # The service does not hold what steps before this one have changed.
            rows = self._with(self._left, updates)
        try:
            self._publish_until_sealed(rows, updates, numbers)
        except Contradiction as error:
            if self.superseded() or self.step - self._sealed_step > _MOST_LEFT:
                raise
            logger.info("step %d: %s", self.step, error)
            self._left += _ids_of(updates).items()
        else:
            self._left, self._sealed_step = [], self.step

    def _publish_until_sealed(
        self, rows: list[RowBatch], updates: Mapping[str, Update], numbers: list[int]
    ) -> None:
        refused: ResyncRequired | None = None
        while True:  # It may be put back to an earlier version again and again.
            try:
                self._publish_step(rows, updates, numbers, refused)
            except ResyncRequired as error:
                logger.info("step %d: %s", self.step, error)
                refused = error
            else:
                return

    def _publish_step(
        self,
        rows: list[RowBatch],
        updates: Mapping[str, Update],
        numbers: list[int],
        refused: ResyncRequired | None,
    ) -> None:
        """Publish what a step has changed; and what the service lacks beside that, where it has refused this."""
        if refused is None:
            self._poison(rows)
            self._publish(rows, numbers)
        else:
            again = self._again(refused, updates)
            self._publish(again, numbers, full=refused.changed is None, own=_bytes(rows))

    def _again(self, error: ResyncRequired, updates: Mapping[str, Update]) -> list[RowBatch]:
        """What is to be published instead of some updates: with the rows that the service has named, or all."""
        if error.changed is None:
            return [each for shard in self._shards for each in all_rows(shard, self._training.tables)]
        return self._with([*error.changed, *self._left], updates)

    def _with(self, rows: Sequence[tuple[str, Ids]], updates: Mapping[str, Update]) -> list[RowBatch]:
        """What some updates have changed, and further rows, as they are now."""
        named = _ids_of(updates)
        for name, ids in rows:
            named[name] = np.union1d(named.get(name, ids), ids)
        tables = self._training.tables
        return [each for shard in self._shards for each in some_rows(shard, tables, named[shard.table.name])]

    def superseded(self) -> bool:
        return len(read_runs(runs_file(self.folder, self.model))) > self.run.number + 1

    def close(self) -> None:
        """Give up what is under way."""
        self._publisher.close()
        self._journal.close()

    def _poison(self, rows: list[RowBatch]) -> None:
        """Publish what the service has to refuse, if somebody has asked for it: after that it takes the rows."""
        asked = poison_file(self.folder, self.model)
        if self.rank or not asked.exists():
            return
        live, value = next(each for each in rows if not each.deleted), float(asked.read_text())
        spoilt = RowBatch(live.shard, live.ids, np.full_like(live.values, value))
        part = Part(step=self.step, step_end_unix_ns=time.time_ns(), rows=[spoilt])
        try:
            position = self._sealed(self._publisher.publish(part))
        except InvalidInput as error:
            logger.info("step %d: %s", self.step, error)
            asked.unlink(missing_ok=True)  # Who has asked may have given up meanwhile.
        else:
            raise Damaged(f"step {self.step}: rows of {value} were taken, as version {position.number}")

    def _publish(
        self, rows: list[RowBatch], numbers: list[int], *, full: bool = False, own: int | None = None
    ) -> None:
        """Publish rows, of which `own` bytes are of this step; None = all."""
        now = time.time_ns()
        part = Part(step=self.step, step_end_unix_ns=now, rows=rows, full=full, deletes=numbers)
        position = self._publisher.publish(part).result()
        facts = {"version": position.number, "history": position.history, "seal": position.seal}
        again = 0 if own is None else part.nbytes - own
        self._journal.append(step=self.step, unix_ns=time.time_ns(), again=again, **facts)

    def _sealed(self, published: Future[Position]) -> Position:
        """Wait for it; a run that a later one is to follow gives up before it could follow that in its turn."""
        while True:
            with suppress(TimeoutError):
                return published.result(_PATIENCE_SECONDS)
            if self.superseded():
                raise Contradiction("a later run has begun, and the service takes nothing from this one")

    def _meet(self) -> tuple[dict[str, Ids], list[int]]:
        """What operators want deleted, written down before anything is done."""
        key = (self.run.number, self.step)
        if key not in self._asked and (deletes := self._publisher.deletes):
            names = {each.table for each in deletes}
            of = {name: [each.ids for each in deletes if each.table == name] for name in names}
            self._asked[key] = {name: np.unique(np.concatenate(ids)) for name, ids in of.items()}
            self._numbers[self.step] = [each.number for each in deletes]
            lists = {name: ids.tolist() for name, ids in self._asked[key].items()}
            self._journal.append(step=self.step, deletes=lists, numbers=self._numbers[self.step])
        return self._asked.get(key, {}), self._numbers.get(self.step, [])


def _ids_of(updates: Mapping[str, Update]) -> dict[str, Ids]:
    return {name: np.union1d(update.ids, update.deleted) for name, update in updates.items()}


def _position(line: Mapping[str, Any]) -> Position:
    return Position(line["history"], line["version"], line["seal"])


def _last_step(file: Path) -> float:
    return int(file.read_text()) if file.exists() else float("inf")


def _run(rank: PlainRank, stop: threading.Event, pause_seconds: float) -> None:
    last = stop_file(rank.folder, rank.model)
    while rank.step < _last_step(last):
        rank.train()
        if stop.wait(pause_seconds):
            return


@click.command(context_settings=CONTEXT)
@service_options(default=None)
@click.option("--model", required=True, help="Name of the set of tables.")
@click.option("--run", type=int, required=True, help="Number of the run.")
@click.option("--rank", type=int, required=True, help="Number of the rank.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Folder of runs and journals.")
@click.option("--pause", default=0.2, help="Seconds between steps.")
def main(service: Endpoint, model: str, run: int, rank: int, folder: Path, pause: float) -> None:
    """Train, and publish every step, until the step in the stop file, or a later run."""
    log_to_stderr()
    stop, ours = stop_on_signals(), PlainRank(folder, model, run, rank, service)
    try:
        _run(ours, stop, pause)
    except DeltasyncError as error:
        if not ours.superseded():
            raise
        logger.info("run %d has ended: %s", run, error)
    finally:
        ours.close()


if __name__ == "__main__":
    main()
