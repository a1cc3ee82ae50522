"""How a model comes back after a restart: the newest sound checkpoint, then the log that follows it.

A damaged checkpoint is passed over for an older one. If the log is damaged after some version, the model goes back
to that version, and its trainer publishes again what came later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from deltasync.base.errors import StorageFailed
from deltasync.base.progress import Progress
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.manifest import Manifest, TableEntry, TableKey
from deltasync.checkpoints.place import PlaceFailed
from deltasync.checkpoints.store import CheckpointStore
from deltasync.core.changes import Stamps
from deltasync.core.position import line_of
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.records import reading, seal_of_record, unpack_json
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied import AppliedTables
from deltasync.model.model_store import ModelStore
from deltasync.model.tables import published_rows

MODEL_OWNER = ""  # The owner of the model's own tables in a checkpoint.


class RowsLost(StorageFailed):
    """Neither the log nor a checkpoint has all rows of a model: its trainer has to send them."""


@dataclass(frozen=True)
class Recovered:
    """Where a model is once it came back.

    Attributes:
        seals: the seals that the log has, oldest first.
        published: the number of rows of each table when it was last published, by the table's name.
        checkpoint: the checkpoint it came back from; None if the log had everything.
    """

    seals: list[Seal]
    published: dict[str, int]
    checkpoint: Manifest | None


class Recovery:
    """Brings the tables of a model back, and what is derived from them. Used once, on the model's thread.

    Attributes:
        problems: which checkpoints and parts of the log could not be used, and why. Any thread may read it.
    """

    def __init__(
        self,
        model: str,
        log: LogStore,
        store: ModelStore,
        checkpoints: CheckpointStore,
        applied: AppliedTables,
        derived: Sequence["ViewRecovery"],
        problems: list[str],
    ) -> None:
        """Prepare to fill `applied`. Problems are added to `problems`; `Model` describes the rest."""
        self.problems = problems
        self._model = model
        self._log = log
        self._store = store
        self._checkpoints = checkpoints
        self._applied = applied
        self._derived = derived

    def recover(self, record: Mapping[str, Any]) -> Recovered:
        """Bring the model back as of the last sealed cut that is sound. `record` is the log's record of the model.

        Raises:
            RowsLost: no checkpoint can be used, and the log does not go back far enough.
            StorageFailed: a record is damaged, or there is no room.
        """
        self._store.recover(record)
        while True:
            seals, problem = self._sound_seals()
            if problem:  # A trainer learns how far the service is, and publishes the rest again.
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
            table.spec.name: published_rows(table, grown.get(table.spec.name, 0), whole)
            for table in self._applied.tables
        }
        return Recovered(seals, published, checkpoint)

    # The log.

    def _sound_seals(self) -> tuple[list[Seal], str]:
        """The log's seals, see `ModelStore.seals`. If one is damaged, those from a checkpoint on are enough."""
        seals, problem = self._store.seals()
        for manifest in self._checkpoints.manifests().manifests if problem else ():
            later, problem_of_later = self._store.seals(manifest.version)
            if later and (later[0].version, later[0].checksum) == (manifest.version, manifest.seal):
                self._note_problem(problem)
                return later, problem_of_later
        return seals, problem

    def _replay(self, seals: Sequence[Seal], version: int) -> tuple[int, str] | None:
        """Apply the log's versions that follow the one that the tables are at.

        Returns:
            None if all are sound; otherwise the last sound version, and what is wrong with the next.
        """
        missing = [seal for seal in seals if seal.version > version]
        progress = Progress(f"model {self._model!r}: reading the log", sum(seal.rows for seal in missing))
        self._applied.begin_at(next((seal for seal in seals if seal.version == version), None))
        for each in self._derived:
            each.replay(version)
        for seal in missing:
            try:
                self._applied.apply(seal, None)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:
                return seal.version - 1, str(error)
            for each in self._derived:
                each.replay(seal.version)
            progress.add(seal.rows)
        return None

    def _go_back(self, version: int, problem: str) -> None:
        """Drop what the log has after a version, the last sound one."""
        self._note_problem(
            f"the log has nothing sound after version {version}, which is the newest now: {problem}"
        )
        self._store.go_back(version)

    def _note_problem(self, problem: str) -> None:
        if problem not in self.problems:  # A second try finds the same again.
            self.problems.append(problem)

    # Checkpoints.

    def _load_newest(self, seals: list[Seal]) -> tuple[Manifest | None, list[Seal]]:
        """Load the newest checkpoint that is sound and goes with the log, which has these seals.

        Returns:
            The checkpoint, None if the log has everything; and the seals that the log has then.
        """
        listing = self._checkpoints.manifests()
        if listing.unreachable and self._log.shared:  # It may have what that log has lost.
            raise StorageFailed("; ".join(listing.unreachable))
        for problem in (*listing.problems, *listing.unreachable):
            self._note_problem(problem)
        end = LogEnd(self._store.history, {seal.version: seal.checksum for seal in seals}, self._store.dropped)
        candidates = [(each, self._fitness(each, end)) for each in listing.manifests]
        for _, decision in candidates:
            if decision.fit is Fit.FORKED:
                self._note_problem(decision.reason)
        # An older version is better than none: the trainer publishes what comes after it again.
        for accepted in ((Fit.FITS, Fit.AHEAD), (Fit.GAP,)):
            for manifest, decision in candidates:
                if decision.fit in accepted and self._load(manifest, listing.unreachable):
                    if decision.fit is not Fit.FITS:
                        self._note_problem(f"{decision.reason}: the log goes on from it")
                        self._store.go_back(manifest.version)
                        self._store.add_seals(self._lost_seals(manifest, end))
                        seals, _ = self._sound_seals()
                    return manifest, seals
            if listing.unreachable and self._store.dropped:  # What cannot be read now may go with the log.
                raise StorageFailed("; ".join(listing.unreachable))
        if self._store.dropped:
            text = f"the log has no rows of model {self._model!r} up to version {self._store.dropped}, and"
            # A volume may not be mounted. Only broken checkpoints, or a log elsewhere, show that rows are lost.
            if not (listing.manifests or listing.problems or self._log.shared):
                raise StorageFailed(f"{text} there are no checkpoints of it: put them back, or {RESTORE}")
            why = "; ".join(self.problems) or "there is none"
            raise RowsLost(f"{text} no checkpoint can be used: {why}: {RESTORE}")
        self._begin(None)
        return None, seals

    def _load(self, manifest: Manifest, unreachable: list[str]) -> bool:
        """Load a checkpoint. Returns whether that went well.

        A part of it may be damaged, or a place cannot be reached now: then its error is added to `unreachable`.
        """
        tables = self._begin(manifest)
        try:
            self._checkpoints.load(manifest, [tables.get(entry.key) for entry in manifest.tables])
            dirty = self._checkpoints.dirty(manifest)
        except (CheckpointDamaged, PlaceFailed) as error:
            if isinstance(error, PlaceFailed):
                unreachable.append(str(error))
                if self._log.shared:  # It may have what that log has lost.
                    raise
            self._note_problem(f"the checkpoint of version {manifest.version} is passed over: {error}")
            return False
        for each in self._derived:
            each.restored(dirty)
        return True

    def _begin(self, manifest: Manifest | None) -> dict[TableKey, StampedTable]:
        """Make all tables, empty, of the model and of what is derived from it.

        Returns:
            The tables that a checkpoint has rows of, by its keys.
        """
        self._applied.tables = []  # A try before may have left tables, and there may be no room for both.
        for each in self._derived:
            each.let_go()
        self._applied.begin()
        tables = {
            TableKey(MODEL_OWNER, table.spec.name, table.removed_before): table for table in self._applied.tables
        }
        for each in self._derived:
            entries = [entry for entry in manifest.tables if entry.key.owner == each.owner] if manifest else []
            state = manifest.states.get(each.owner) if manifest else None
            for entry, table in zip(entries, each.restore(state, entries), strict=True):
                if table:
                    tables[entry.key] = table
        return tables

    # How a checkpoint goes with the log.

    def _fitness(self, manifest: Manifest, end: "LogEnd") -> "Fitness":
        past = {manifest.version: manifest.seal}
        if manifest.version > end.newest:
            try:
                past |= {seal.version: seal.checksum for seal in self._seals_of(manifest)}
            except CheckpointDamaged as error:
                return Fitness(Fit.FORKED, f"the checkpoint of version {manifest.version} is passed over: {error}")
        return fitness(manifest.version, manifest.history, past, end)

    def _seals_of(self, manifest: Manifest) -> Iterator[Seal]:
        """The seals that a checkpoint has."""
        for stream, number, _, _, payload in self._checkpoints.records(manifest):
            if stream == f"seals/{self._model}":
                with reading(f"seal of version {number} of model {self._model!r} in a checkpoint"):
                    yield seal_of_record(unpack_json(payload))

    def _lost_seals(self, manifest: Manifest, end: "LogEnd") -> list[Seal]:
        """The seals that a checkpoint has and the log has lost."""
        seals = self._seals_of(manifest) if manifest.version > end.newest else ()
        return [seal for seal in seals if end.newest < seal.version <= manifest.version]


class ViewRecovery(Protocol):
    """Brings back a view: tables that are made of a model's tables and of the log. Used on the model's thread.

    `Recovery` calls `restore`, then `restored` once the tables that it returned are loaded. Then it calls `replay`
    for the version that they are of, and for each that follows. If something is damaged, it begins again.
    """

    @property
    def owner(self) -> str:
        """As in the keys of its tables in a checkpoint."""

    def let_go(self) -> None:
        """Keep nothing of an earlier `restore`: its tables are in the way of new ones."""

    def restore(self, state: Mapping[str, Any] | None, entries: Sequence[TableEntry]) -> list[StampedTable | None]:
        """Begin with the tables that a checkpoint has of it.

        Args:
            state: what `Source.checkpoint_state` had returned; None = there is no checkpoint of it.
            entries: its tables in the checkpoint.

        Returns:
            The tables to be loaded, in the order of `entries`; None for one that is no longer needed.
        """

    def restored(self, dirty: Mapping[TableKey, tuple[Ids, Stamps]]) -> None:
        """Go on once all rows of the tables are loaded; `dirty` has those of `SourceTable.dirty`."""

    def replay(self, version: int) -> None:
        """Make again what the log says that was made of the model's version, which its tables are at."""


class Fit(Enum):
    """How a checkpoint goes with a log."""

    FITS = "fits"  # The log goes on from it.
    AHEAD = "ahead"  # The log has lost versions that the checkpoint has.
    FORKED = "forked"  # It is of a past that the log does not have.
    GAP = "gap"  # The log has dropped or lost what comes after it.


@dataclass(frozen=True)
class LogEnd:
    """What a log has of a model.

    Attributes:
        history: the id of the model's history.
        seals: the checksums of its seals, by version.
        dropped: the version up to which it has dropped the rows of cuts.
    """

    history: str
    seals: Mapping[int, int]
    dropped: int

    @property
    def newest(self) -> int:
        """The newest version it has; 0 if it has none."""
        return max(self.seals, default=0)


@dataclass(frozen=True)
class Fitness:
    """How a checkpoint goes with a log, and why."""

    fit: Fit
    reason: str


def fitness(version: int, history: str, seals: Mapping[int, int], log: LogEnd) -> Fitness:
    """How a checkpoint of a version of some history, which has `seals` (checksums by version), goes with a log."""
    text = f"the checkpoint of version {version}"
    if line_of(history) != line_of(log.history):
        return Fitness(Fit.FORKED, f"{text} is of another history than the log")
    if version > log.newest:
        if log.newest and seals.get(log.newest, log.seals[log.newest]) != log.seals[log.newest]:
            return Fitness(Fit.FORKED, f"{text} is of another past than version {log.newest} of the log")
        return Fitness(Fit.AHEAD, f"{text} is ahead of the log, whose newest is {log.newest}")
    if log.seals.get(version, seals[version]) != seals[version]:
        return Fitness(Fit.FORKED, f"{text} is of another past than that of the log")
    if log.dropped > version:
        return Fitness(Fit.GAP, f"{text} is older than what the log has dropped, up to version {log.dropped}")
    return Fitness(Fit.FITS, f"the log goes on from {text}")
