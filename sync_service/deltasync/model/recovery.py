"""Recovery of a model after a restart: load the newest sound checkpoint, then apply the log after it.

A damaged checkpoint is skipped for an older one. If all are damaged from which the log continues, the model lacks
the rows of the damaged chunks until its trainer sends them. If the log is damaged after some version, the model
goes back to that version, and its trainer publishes the later rows again. Nothing is removed because of damage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from deltasync.base.errors import StorageFailed
from deltasync.base.logs import Progress
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.checkpoints.manifest import Manifest, TableEntry, TableKey
from deltasync.checkpoints.salvage import salvage
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.changes import Stamps
from deltasync.core.position import line_of
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal, seal_of_record
from deltasync.core.stamped_table import StampedTable
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.records import reading, unpack_json
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied_tables import MODEL_OWNER, AppliedTables, key_of, published_rows
from deltasync.model.model_store import ModelStore


class RowsLost(StorageFailed):
    """Neither the log nor a checkpoint has the rows of a model. The next start tries again."""


@dataclass(frozen=True)
class RecoveryResult:
    """The result of a recovery.

    Attributes:
        published: the number of rows of each table when it was last published, by table name.
        checkpoint: the loaded checkpoint; None if the log had everything.
    """

    seals: list[Seal]
    published: dict[str, int]
    checkpoint: Manifest | None


class ModelRecovery:
    """Restores the tables of a model and its views. Used once, on the model's thread."""

    def __init__(
        self,
        model: str,
        log: LogStore,
        store: ModelStore,
        checkpoints: CheckpointStore,
        tables: AppliedTables,
        views: Sequence["ViewRecovery"],
        problems: list[str],
    ) -> None:
        """Prepare to fill `tables`. Whatever cannot be used of checkpoints and log is added to `problems`."""
        self.problems = problems
        self._model = model
        self._log = log
        self._store = store
        self._checkpoints = checkpoints
        self._tables = tables
        self._views = views
        self._missing = dict[TableKey, Ids]()

    def run(self, record: Mapping[str, Any]) -> RecoveryResult:
        """Restore the model as of the last sound sealed cut; see `Model.recover`."""
        self._store.load(record)
        while True:
            seals, problem = self._sound_seals()
            if problem:  # The trainer sees the service's version, and publishes the rest again.
                self._go_back(seals[-1].version if seals else 0, problem)
                continue
            self._store.drop_unsealed(seals[-1].version if seals else 0)
            checkpoint, seals = self._load_newest(seals)
            if (damage := self._replay(seals, checkpoint.version if checkpoint else 0)) is None:
                break
            self._go_back(*damage)
        removed, grown = self._store.removed, self._store.grown_from
        whole = {name for seal in seals for name in seal.whole if seal.version > removed.get(name, 0)}
        published = {
            table.spec.name: published_rows(table, grown.get(table.spec.name, 0), whole) for table in self._tables
        }
        return RecoveryResult(seals, published, checkpoint)

    # The log.

    def _sound_seals(self) -> tuple[list[Seal], str]:
        """The log's seals, see `ModelStore.seals`. If one is damaged, those after a checkpoint are enough."""
        seals, problem = self._store.seals()
        for manifest in self._checkpoints.manifests().manifests if problem else ():
            later, problem_of_later = self._store.seals(manifest.version)
            if later and (later[0].version, later[0].checksum) == (manifest.version, manifest.seal):
                self._note_problem(problem)
                return later, problem_of_later
        return seals, problem

    def _replay(self, seals: Sequence[Seal], version: int) -> tuple[int, str] | None:
        """Apply the log's versions after the version of the tables.

        Returns the last sound version and the problem with the next; None if all are sound.
        """
        missing = [seal for seal in seals if seal.version > version]
        progress = Progress(f"model {self._model!r}: reading the log", sum(seal.rows for seal in missing))
        missing_ids = {key.name: ids for key, ids in self._missing.items() if key.owner == MODEL_OWNER}
        self._tables.begin_at(next((seal for seal in seals if seal.version == version), None), missing_ids)
        for each in self._views:
            each.replay(version)
        for seal in missing:
            try:
                self._tables.apply(seal, None)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:
                return seal.version - 1, str(error)
            for each in self._views:
                each.replay(seal.version)
            progress.add(seal.rows)
        return None

    def _go_back(self, version: int, problem: str) -> None:
        """Leave out the log's records after a version, the last sound one."""
        self._note_problem(f"the log is damaged after version {version}, and continues from there: {problem}")
        self._store.go_back(version)

    def _note_problem(self, problem: str) -> None:
        if problem not in self.problems:  # Another attempt finds the same problem again.
            self.problems.append(problem)

    # Checkpoints.

    def _load_newest(self, seals: list[Seal]) -> tuple[Manifest | None, list[Seal]]:
        """Load the newest sound checkpoint that fits the log with these seals.

        Returns it, or None if the log has everything; and the seals that the log then has.
        """
        listing = self._checkpoints.manifests()
        if listing.unreachable and self._log.shared:  # It may have rows that the log has lost.
            raise StorageFailed("; ".join(listing.unreachable))
        for problem in (*listing.problems, *listing.unreachable):
            self._note_problem(problem)
        end = LogEnd(self._store.history, {seal.version: seal.checksum for seal in seals}, self._store.dropped)
        candidates = [(each, self._fitness(each, end)) for each in listing.manifests]
        for _, decision in candidates:
            if decision.fit is Fit.FORKED:
                self._note_problem(decision.reason)
        # An older version is better than none: the trainer publishes later rows again.
        for accepted in ((Fit.FITS, Fit.AHEAD), (Fit.GAP,)):
            fitting = [(each, decision) for each, decision in candidates if decision.fit in accepted]
            for manifest, decision in fitting:
                if self._load(manifest, listing.unreachable):
                    return manifest, self._continued(manifest, decision, end, seals)
            if listing.unreachable and self._store.dropped:  # An unreachable checkpoint may fit the log.
                raise PlaceFailed("; ".join(listing.unreachable))
            # If the log has every row since the first version, nothing is missing.
            damaged = [each for each in fitting if self._store.dropped or each[1].fit is Fit.AHEAD]
            if salvaged := self._salvage_best([manifest for manifest, _ in damaged]):
                decision = next(decision for each, decision in damaged if each is salvaged)
                return salvaged, self._continued(salvaged, decision, end, seals)
        if self._store.dropped:
            text = f"the log has no rows of model {self._model!r} up to version {self._store.dropped}, and"
            # A volume may not be mounted. Only broken checkpoints, or brokers, show that rows are really lost.
            if not (listing.manifests or listing.problems or self._log.shared):
                raise StorageFailed(f"{text} it has no checkpoints: put them back, or {RESTORE}")
            why = "; ".join(self.problems) or "there is none"
            raise RowsLost(f"{text} no checkpoint is usable: {why}")
        self._begin(None)
        return None, seals

    def _continued(self, manifest: Manifest, decision: "Fitness", end: "LogEnd", seals: list[Seal]) -> list[Seal]:
        """The seals with which the log continues from a loaded checkpoint."""
        if decision.fit is Fit.FITS:
            return seals
        self._note_problem(f"{decision.reason}; the model goes back to it, its trainer sends the rest")
        self._store.go_back(manifest.version)
        self._store.add_seals(self._lost_seals(manifest, end))
        return self._sound_seals()[0]

    def _load(self, manifest: Manifest, unreachable: list[str]) -> bool:
        """Load a checkpoint, and return whether it succeeded. Errors of places are added to `unreachable`."""
        tables = self._begin(manifest)
        try:
            self._checkpoints.load(manifest, [tables.get(entry.key) for entry in manifest.tables])
            dirty = self._checkpoints.dirty(manifest)
        except (CheckpointDamaged, PlaceFailed) as error:
            if isinstance(error, PlaceFailed):
                unreachable.append(str(error))
                if self._log.shared:  # It may have rows that the log has lost.
                    raise
            self._note_problem(f"the checkpoint of version {manifest.version} is damaged: {error}")
            return False
        for each in self._views:
            each.loaded(dirty)
        return True

    def _salvage_best(self, damaged: Sequence[Manifest]) -> Manifest | None:
        """Load the damaged checkpoint that lacks the fewest rows; None if none can be loaded."""
        best, fewest = None, 0
        for manifest in damaged:
            lost = self._salvage(manifest)
            if lost is not None and (best is None or lost < fewest):
                best, fewest = manifest, lost
        if best and best is not damaged[-1]:
            self._salvage(best)
        return best

    def _salvage(self, manifest: Manifest) -> int | None:
        """Load the sound part of a checkpoint. Return the number of lost rows; None if it cannot be loaded."""
        tables, problems = self._begin(manifest), list[str]()
        selected = [tables.get(entry.key) for entry in manifest.tables]
        try:
            self._missing = salvage(self._checkpoints, manifest, selected, problems)
        except CheckpointDamaged as error:
            self._note_problem(str(error))
            return None
        for problem in problems:
            if not any(problem in known for known in self.problems):
                self._note_problem(problem)
        dirty, incomplete = dict[TableKey, tuple[Ids, Stamps]](), {key.owner for key in self._missing}
        try:
            dirty = self._checkpoints.dirty(manifest)
        except CheckpointDamaged:
            incomplete |= {each.owner for each in self._views}
        for each in self._views:
            each.loaded(dirty)
            if each.owner in incomplete:
                each.give_up(f"the checkpoint of version {manifest.version} has lost rows of it")
        return sum(map(len, self._missing.values()))

    def _begin(self, manifest: Manifest | None) -> dict[TableKey, StampedTable]:
        """Make all tables of the model and its views, empty. Return those in the checkpoint, by its keys."""
        self._missing = {}
        self._tables.drop()  # An earlier attempt may have left tables, and there may be no room for both.
        for each in self._views:
            each.discard()
        self._tables.begin()
        tables = {key_of(table): table for table in self._tables}
        for each in self._views:
            entries = [entry for entry in manifest.tables if entry.key.owner == each.owner] if manifest else []
            state = manifest.states.get(each.owner) if manifest else None
            for entry, table in zip(entries, each.restore(state, entries), strict=True):
                if table:
                    tables[entry.key] = table
        return tables

    # Whether a checkpoint fits the log.

    def _fitness(self, manifest: Manifest, end: "LogEnd") -> "Fitness":
        past = {manifest.version: manifest.seal}
        if manifest.version > end.newest:
            try:
                past |= {seal.version: seal.checksum for seal in self._seals_of(manifest)}
            except CheckpointDamaged as error:
                return Fitness(Fit.FORKED, f"the checkpoint of version {manifest.version} is skipped: {error}")
        return fitness(manifest.version, manifest.history, past, end)

    def _seals_of(self, manifest: Manifest) -> Iterator[Seal]:
        """The seals in a checkpoint."""
        for stream, number, _, _, payload in self._checkpoints.records(manifest):
            if stream == f"seals/{self._model}":
                with reading(f"seal of version {number} of model {self._model!r} in a checkpoint"):
                    yield seal_of_record(unpack_json(payload))

    def _lost_seals(self, manifest: Manifest, end: "LogEnd") -> list[Seal]:
        """The seals that a checkpoint has and the log lost."""
        seals = self._seals_of(manifest) if manifest.version > end.newest else ()
        return [seal for seal in seals if end.newest < seal.version <= manifest.version]


class ViewRecovery(Protocol):
    """Restores a view, whose tables derive from a model's tables and the log. Used on the model's thread.

    `ModelRecovery` calls `restore`, then `loaded` once the returned tables are loaded. It then calls `replay` for
    their version and for each later one. If something is damaged, it starts over.
    """

    @property
    def owner(self) -> str:
        """The owner in the keys of its tables in a checkpoint."""

    def discard(self) -> None:
        """Discard the tables of an earlier `restore`, to make room for new ones."""

    def restore(self, state: Mapping[str, Any] | None, entries: Sequence[TableEntry]) -> list[StampedTable | None]:
        """Begin with the view's tables in a checkpoint, and the `Source.checkpoint_state` there, if any.

        Returns the tables to load, in the order of `entries`; None for one that is no longer needed.
        """

    def loaded(self, dirty: Mapping[TableKey, tuple[Ids, Stamps]]) -> None:
        """Continue once all rows of the tables are loaded; `dirty` has their `SourceTable.dirty`."""

    def give_up(self, why: str) -> None:
        """Give the view up, because rows of it are lost: its replicas get every row of a new one."""

    def replay(self, version: int) -> None:
        """Repeat the releases that the log has for a model version, with the model's tables at that version."""


class Fit(Enum):
    """How a checkpoint fits a log."""

    FITS = "fits"  # The log continues from it.
    AHEAD = "ahead"  # The log lost versions that the checkpoint has.
    FORKED = "forked"  # It belongs to a past that the log does not have.
    GAP = "gap"  # The log dropped or lost the versions after it.


@dataclass(frozen=True)
class LogEnd:
    """The seals of a model in the log, against which checkpoints are checked.

    Attributes:
        seals: the checksums of its seals, by version.
        dropped: the version up to which it has dropped the rows of cuts.
    """

    history: str
    seals: Mapping[int, int]
    dropped: int

    @property
    def newest(self) -> int:
        """The newest version in the log; 0 if there is none."""
        return max(self.seals, default=0)


@dataclass(frozen=True)
class Fitness:
    """How a checkpoint fits a log, and why."""

    fit: Fit
    reason: str


def fitness(version: int, history: str, seals: Mapping[int, int], log: LogEnd) -> Fitness:
    """Compare a checkpoint, with its history and its `seals` (checksums by version), with a log."""
    text = f"the checkpoint of version {version}"
    if line_of(history) != line_of(log.history):
        return Fitness(Fit.FORKED, f"{text} belongs to another history than the log")
    if version > log.newest:
        if log.newest and seals.get(log.newest, log.seals[log.newest]) != log.seals[log.newest]:
            return Fitness(Fit.FORKED, f"{text} does not follow version {log.newest} of the log")
        return Fitness(Fit.AHEAD, f"{text} is ahead of the log, whose newest version is {log.newest}")
    if log.seals.get(version, seals[version]) != seals[version]:
        return Fitness(Fit.FORKED, f"{text} differs from the log's version {version}")
    if log.dropped > version:
        return Fitness(Fit.GAP, f"{text} is too old: the log has dropped the rows up to version {log.dropped}")
    return Fitness(Fit.FITS, f"the log continues from {text}")
