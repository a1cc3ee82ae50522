"""A plain model of all versions that a trainer publishes, and replicas that compare every release with it."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deltasync.client import NumpyTarget, Position, Release, RowBatch, TableKind, TableSpec
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.table_form import Mode, TableForm, value_type_of

_MOST_WRONG = 20
_NONE: Ids = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Rows:
    """Rows of a table that a step has changed: ids [n], ascending; values [n, dim]; deleted, bool [n]."""

    ids: Ids
    values: Values
    deleted: Mask

    def of(self, ids: Ids) -> tuple[Ids, Ids]:
        """Which of these ids ([m], ascending) are here: their positions here, and in `ids`."""
        _, here, there = np.intersect1d(self.ids, ids, assume_unique=True, return_indices=True)
        return here, there


@dataclass(frozen=True)
class Step:
    """The changes of a step by table, and all tables at that step."""

    number: int
    tables: Mapping[str, TableSpec]
    changed: Mapping[str, Rows]


class EveryVersion:
    """All published steps, and the version that each became.

    Steps count from 1. A step is added before it is published, so that no replica can be ahead.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._step_of: dict[int, int] = {}
        self._lock = threading.Lock()

    def between(self, after: int, last: int) -> Sequence[Step]:
        """The steps after one, up to and including another."""
        return self.steps[after:last]

    def contradicts(self, version: int, step: int) -> str:
        """Record the step of a version; returns the contradiction to earlier records, if any."""
        with self._lock:
            known = self._step_of.setdefault(version, step)
        if known != step:
            return f"version {version} is said to be step {step}, and step {known}"
        return (
            "" if 1 <= step <= len(self.steps) else f"version {version} is said to be step {step}: there is none"
        )


class Then:
    """The model's tables after a step, from which it moves forward."""

    def __init__(self, versions: EveryVersion) -> None:
        self.step = 0
        self.tables: dict[str, Values] = {}
        self.deleted: dict[str, Mask] = {}
        self._versions = versions

    def advance(self, step: int) -> Sequence[Step]:
        """Move forward to a later step; returns the steps in between."""
        since = self._versions.between(self.step, step)
        for each in since:
            for spec in each.tables.values():
                self._make_room(spec)
            for name, rows in each.changed.items():
                self.tables[name][rows.ids] = rows.values
                self.deleted[name][rows.ids] = rows.deleted
        self.step = max(self.step, step)
        return since

    def rows(self, name: str, ids: Ids) -> Values:
        """Rows of a table; zeros if there were none."""
        table = self.tables[name]
        found = np.zeros((len(ids), table.shape[1]), table.dtype)
        there = ids < len(table)
        found[there] = table[ids[there]]
        return found

    def _make_room(self, spec: TableSpec) -> None:
        had = self.tables.get(spec.name, np.zeros((0, spec.dim), spec.dtype))
        if len(had) < spec.rows:
            self.tables[spec.name] = np.zeros((spec.rows, spec.dim), spec.dtype)
            self.tables[spec.name][: len(had)] = had
            self.deleted[spec.name] = np.append(
                self.deleted.get(spec.name, np.zeros(0, np.bool_)), np.zeros(spec.rows - len(had), np.bool_)
            )


@dataclass
class Seen:
    """The rows that the replicas of one consumer had at each position, which must be equal for all of them."""

    held: dict[Position, tuple[int, int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def contradicts(self, position: Position, found: tuple[int, int, int]) -> str:
        with self._lock:
            known = self.held.setdefault(position, found)
        return "" if known == found else f"version, step and rows are {found} now, and were {known}"


class Compared(NumpyTarget):
    """Compares each release, and all rows after it, with the model at the step that the release names.

    Attributes:
        wrong: the differences found.
        releases: number of compared releases.
        anew: number of releases that had all rows of a table.
        specs: the tables of the last release, by name.
    """

    def __init__(self, versions: EveryVersion, seen: Seen, *, complete: bool, first: bool = True) -> None:
        """Compare with these versions.

        Args:
            versions: the model's versions.
            seen: what other replicas of the consumer had.
            complete: whether the consumer's policy leaves no rows for later.
            first: whether this is the first replica of its consumer. If the policy leaves rows for later, only the
                first replica gets all rows of one version with its first release.
        """
        super().__init__()
        self.wrong: list[str] = []
        self.releases = self.anew = 0
        self._versions, self._seen = versions, seen
        self._complete, self._first = complete, first
        self._then = Then(versions)
        self._held = Position()
        self.specs: dict[str, TableSpec] = {}
        self._sums: dict[str, Any] = {}
        self._parts: list[RowBatch] = []

    def apply(self, release: Release) -> None:
        """See `Target`."""
        super().apply(release)
        self._parts += release.rows
        if not release.more:
            rows, self._parts = self._parts, []
            self._compare(release, rows)

    def whole_is_wrong(self) -> Iterator[str]:
        """The differences of all rows, for a consumer that gets everything."""
        for name, spec in self.specs.items():
            yield from self._differing(spec, np.arange(len(self.tables[name])), "all rows that are held")

    def _compare(self, release: Release, rows: Sequence[RowBatch]) -> None:
        before, position = self._held, release.position
        if release.resync and self.releases:
            self._say(release, "everything was sent again")
        # One without rows says again what is held, to a replica that has come back.
        if position.history == before.history and position.number < before.number + bool(release.changes):
            self._say(release, f"it comes after {before.number}")
        if wrong := self._versions.contradicts(release.version, release.step):
            self._say(release, wrong)
            return
        if release.step < self._then.step:
            self._say(release, f"its step is earlier than that of the release before, {self._then.step}")
        if release.resync or release.step < self._then.step:
            self._then = Then(self._versions)
        next_one = position.history == before.history and position.number == before.number + 1
        exact = self._complete or next_one or (self._first and not self.releases)
        ids = {spec.name: _joined(rows, spec.name) for spec in release.tables}
        some = (
            {} if exact else {s.name: self._equal(s, ids[s.name], self._then.rows) for s in self._known(release)}
        )
        since = self._then.advance(release.step)
        for spec in release.tables:
            if not exact:
                self._was_some_version(release, spec, ids[spec.name], some.get(spec.name), since)
            for wrong in self._wrong_rows(release, spec, ids[spec.name], since, exact=exact):
                self._say(release, wrong)
            self._sum(release, spec, ids[spec.name])
        self.specs = {spec.name: spec for spec in release.tables}
        self._sums = {name: self._sums[name] for name in self.specs}
        found = (release.version, release.step, sum(int(each.sum()) for each in self._sums.values()) % 2**64)
        if wrong := self._seen.contradicts(position, found):
            self._say(release, wrong)
        self._held = position
        self.anew += any(_resets(release, spec) for spec in release.tables)
        self.releases += 1

    def _known(self, release: Release) -> list[TableSpec]:
        return [spec for spec in release.tables if spec.name in self._then.tables]

    def _wrong_rows(
        self, release: Release, spec: TableSpec, ids: Ids, since: Sequence[Step], *, exact: bool
    ) -> Iterator[str]:
        """Rows that differ from the model at the step."""
        name, resets = spec.name, _resets(release, spec)
        changed = _joined_ids([each.changed[name].ids for each in since if name in each.changed])
        if self._complete or not spec.kind.ranked:  # Nothing of it is left for later.
            anew = resets or self.specs.get(name) != spec
            looked_at = np.arange(len(self.tables[name])) if anew else _joined_ids([ids, changed])
            yield from self._differing(spec, looked_at, "a table of which nothing is left for later")
            return
        if exact:
            whole = np.arange(len(self.tables[name])) if resets else ids
            yield from self._differing(spec, whole, "all rows of a new table" if resets else "released rows")
            yield from self._differing(spec, self._handed_over(name, since), "rows whose raw id has changed")
        gone = changed[self._then.deleted[name][changed]]
        yield from self._differing(spec, gone, "deleted rows")

    def _handed_over(self, name: str, since: Sequence[Step]) -> Ids:
        return _joined_ids(
            [
                step.changed[spec.name].ids
                for step in since
                for spec in step.tables.values()
                if spec.kind is TableKind.ID_MAP and spec.of == name and spec.name in step.changed
            ]
        )

    def _differing(self, spec: TableSpec, ids: Ids, what: str) -> Iterator[str]:
        wrong = ids[~self._equal(spec, ids, self._then.rows)]
        if len(wrong):
            at = self._steps_of(spec, wrong)
            yield f"{what}, table {spec.name!r}: {len(wrong)} of {len(ids)} rows are not of this step, but {at}"

    def _equal(self, spec: TableSpec, ids: Ids, rows_of: Any) -> Mask:
        """Which of the rows ([n]) equal the encoded rows of the model at a step."""
        return _same(self.tables[spec.name][ids], _as_held(spec, rows_of(spec.name, ids)))

    def _was_some_version(
        self, release: Release, spec: TableSpec, ids: Ids, was: Mask | None, since: Sequence[Step]
    ) -> None:
        """Check that each released row equals its value at some step since the last release."""
        fits = np.zeros(len(ids), np.bool_) if was is None else was
        for step in since:
            if rows := step.changed.get(spec.name):
                here, there = rows.of(ids)
                held = self.tables[spec.name][ids[there]]
                fits[there] |= _same(held, _as_held(spec, rows.values[here]))
        if not fits.all():
            self._say(release, f"table {spec.name!r}: {np.sum(~fits)} of {len(ids)} released rows are of no step")

    def _steps_of(self, spec: TableSpec, ids: Ids) -> str:
        """The steps whose values rows have, to describe a difference."""
        found = np.zeros(len(ids), np.int64)
        for step in self._versions.steps:
            if rows := step.changed.get(spec.name):
                here, there = rows.of(ids)
                held = self.tables[spec.name][ids[there]]
                found[there[_same(held, _as_held(spec, rows.values[here]))]] = step.number
        steps = np.unique(found)
        return f"of {len(steps)} steps from {steps[0]} to {steps[-1]}" + (" (0: of none)" if not steps[0] else "")

    def _sum(self, release: Release, spec: TableSpec, ids: Ids) -> None:
        """Store a number for each row, to compare tables of several replicas."""
        table, sums = self.tables[spec.name], self._sums.get(spec.name)
        if sums is None or _resets(release, spec) or self.specs.get(spec.name) != spec:
            ids, self._sums[spec.name] = np.arange(len(table)), np.zeros(len(table), np.uint64)
        self._sums[spec.name][ids] = _row_sums(table[ids], ids)

    def _say(self, release: Release, wrong: str) -> None:
        if len(self.wrong) < _MOST_WRONG:
            at = f"release {release.position.number} of version {release.version}, step {release.step}"
            self.wrong.append(f"{at}, after {self._held.number} of step {self._then.step}: {wrong}")


class ComparedIds:
    """Compares received ids with those of the rows that changed between the steps that the release names."""

    def __init__(self, versions: EveryVersion) -> None:
        self.wrong: list[str] = []
        self.releases = 0
        self._versions, self._then = versions, Then(versions)

    def apply(self, release: Release) -> None:
        """See `Target`."""
        if release.resync and self.releases:
            self._say(release, "everything was sent again")
        if wrong := self._versions.contradicts(release.version, release.step):
            self._say(release, wrong)
            return
        if release.step < self._then.step:
            self._say(release, f"its step is earlier than that of the release before, {self._then.step}")
            return
        ids = {spec.name: _joined(release.rows, spec.name) for spec in release.tables}
        since = self._versions.between(self._then.step, release.step)
        before = {name: rows.copy() for name, rows in self._then.tables.items()}
        self._then.advance(release.step)
        for spec in release.tables:
            self._compare(release, spec, ids[spec.name], before.get(spec.name), since)
        self.releases += 1

    def _compare(
        self, release: Release, spec: TableSpec, ids: Ids, before: Values | None, since: Sequence[Step]
    ) -> None:
        changed = _joined_ids([each.changed[spec.name].ids for each in since if spec.name in each.changed])
        if len(np.setdiff1d(ids, changed)):
            self._say(release, f"table {spec.name!r}: ids of rows that have not changed since")
        was = np.zeros((len(changed), spec.dim), spec.dtype)
        if before is not None:
            there = changed < len(before)
            was[there] = before[changed[there]]
        differs = changed[~_same(was, self._then.rows(spec.name, changed))]
        if len(lacking := np.setdiff1d(differs, ids)):
            self._say(release, f"table {spec.name!r}: {len(lacking)} ids of rows that have changed are not there")

    def _say(self, release: Release, wrong: str) -> None:
        if len(self.wrong) < _MOST_WRONG:
            self.wrong.append(f"release {release.position.number} of step {release.step}: {wrong}")


def _resets(release: Release, spec: TableSpec) -> bool:
    """Whether a release, together with its earlier parts, has all rows of a table."""
    return release.resync or spec.name in release.whole


def _as_held(spec: TableSpec, rows: Values) -> Values:
    """The model's rows as replicas have them, of a table in a release."""
    if not spec.kind.ranked:
        return rows
    of_model = TableSpec(spec.name, spec.rows, rows.shape[1], rows.dtype)
    form = TableForm(of_model, value_type_of(spec), Mode.EMBEDDINGS)
    return form.held(form.encode(rows))


def _same(held: Values, expected: Values) -> Mask:
    """Which rows (both [n, D]) have the same bits."""
    same = np.ones(len(held), np.bool_)
    same[np.flatnonzero(_bits(held) != _bits(expected)) // held.shape[1]] = False
    return same


def _bits(rows: Values) -> Any:
    """All values of rows ([n, D]) in order, as integers ([n * D])."""
    return np.ascontiguousarray(rows).view(f"u{rows.dtype.itemsize}").reshape(-1)


def _row_sums(rows: Values, ids: Ids) -> Any:
    """A number [n] for the bits and the id of each row."""
    bits = _bits(rows).reshape(rows.shape).astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, bits.shape[1], np.uint64) | np.uint64(1)
    return (bits @ weights + np.uint64(1)) * (ids.astype(np.uint64) * np.uint64(2) + np.uint64(1))


def _joined(rows: Sequence[RowBatch], name: str) -> Ids:
    return _joined_ids([each.ids for each in rows if each.table.name == name])


def _joined_ids(ids: Sequence[Ids]) -> Ids:
    """The union of ids ([n], ascending)."""
    joined: Ids = np.sort(np.concatenate([_NONE, *ids]))
    first = np.ones(len(joined), np.bool_)
    first[1:] = joined[1:] != joined[:-1]
    return joined[first]
