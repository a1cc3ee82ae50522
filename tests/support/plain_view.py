"""A reference for views, with plain dictionaries and sorted tuples, row by row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from deltasync.core.policy import Policy
from deltasync.core.rows import Values
from deltasync.core.table_form import TableForm
from deltasync.core.tables import TableSpec

Rows = Mapping[int, Values]


@dataclass
class PlainTable:
    """A model's table: the rows that have changed, with the version of their last change."""

    table: TableSpec
    rows: dict[int, Values] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)


@dataclass
class PlainHeld:
    """What replicas have of a table: encoded rows, and the versions since which others are dirty."""

    source: PlainTable
    form: TableForm
    rows: dict[int, Values] = field(default_factory=dict)
    dirty_since: dict[int, int] = field(default_factory=dict)

    def row(self, row: int) -> Values:
        zeros = np.zeros((1, self.form.spec.dim), self.form.spec.dtype)
        nothing = self.form.encode(zeros)[0]
        held: Values = self.rows.get(row, nothing)
        return held

    def wanted(self, row: int) -> Values:
        wanted: Values = self.form.encode(self.source.rows[row][None])[0]
        return wanted

    def decoded(self, row: int) -> Values:
        values: Values = self.form.decode(self.row(row)[None])[0]
        return values

    def norm(self, row: int) -> float:
        delta = self.source.rows[row][None].astype(np.float64) - self.decoded(row)[None].astype(np.float64)
        return float(np.sqrt(np.einsum("ij,ij->i", delta, delta))[0])


class DirtyRow(NamedTuple):
    """Sorts by the order of sending."""

    sent_before: bool
    less_norm: float
    table: int
    id: int
    norm: float
    overdue: bool
    size: int


@dataclass(frozen=True)
class PlainRelease:
    """The rows that a release sent and left out."""

    taken: list[DirtyRow]
    left: list[DirtyRow]
    wanted: int

    @property
    def reasons(self) -> set[str]:
        """Texts to expect in the reason."""
        dirty, took = len(self.taken) + len(self.left), len(self.taken)
        if not self.left:
            return {f"took all {dirty} dirty row{'s' * (dirty != 1)}"}
        new, old = sum(not row.sent_before for row in self.taken), sum(row.overdue for row in self.taken)
        said = {f"took {took} of {dirty} dirty row{'s' * (dirty != 1)}: "}
        said |= {f"no more than {took} of {self.wanted} fit max_bytes"} if took < self.wanted else set()
        said |= {f"{new} were never sent before"} if new else set()
        return said | ({f"{old} were older than max_age_seconds"} if old else set())


class PlainModel:
    """A model with one view."""

    def __init__(self) -> None:
        self.version = 0
        self.tables: list[PlainTable] = []
        self.held: list[PlainHeld] = []
        self.compared_version = 0
        self.released_rows = 0  # Of the last release.

    def cut(self, changes: Mapping[str, Rows]) -> None:
        self.version += 1
        for each in self.tables:
            for row, values in changes.get(each.table.name, {}).items():
                each.rows[row], each.versions[row] = values, self.version

    def prepare(self, policy: Policy, overdue: int) -> tuple[PlainRelease, list[PlainHeld]]:
        """Make the release with the tables that a policy follows; returns it, and the new tables."""
        have = {each.form: each for each in self.held}
        followed = [each for each in self.tables if policy.follows(each.table)]
        wanted = [policy.form_of(each.table) for each in followed]
        self.held = [have.get(one) or _whole(each, one) for each, one in zip(followed, wanted, strict=True)]
        new = [each for each in self.held if each.form not in have]
        release = self.release(policy, overdue)
        if new:
            self.released_rows = len(release.taken) + sum(len(each.rows) for each in new)
        return release, new

    def release(self, policy: Policy, overdue: int) -> PlainRelease:
        rest_after = self.released_rows if self.version == self.compared_version else 0
        rows = self.find_dirty(policy, overdue)
        groups = [[row for row in rows if row.table == one] for one in {row.table for row in rows}]
        share = max(Fraction(str(policy.top_k or 0)), Fraction(min(rest_after, len(rows)), max(1, len(rows))))
        wanted = {
            row for group in (groups if policy.top_k_per_table else [rows]) for row in _top(group, policy, share)
        }
        wanted |= {row for row in rows if row.overdue}
        taken = _fitting(wanted, policy.max_bytes)
        for row in taken:
            held = self.held[row.table]
            held.rows[row.id] = held.wanted(row.id)
            del held.dirty_since[row.id]
        self.released_rows = len(taken) or self.released_rows
        left = [row for row in rows if row not in set(taken)]
        return PlainRelease(taken, left, len(wanted))

    def find_dirty(self, policy: Policy, overdue: int) -> list[DirtyRow]:
        rows = []
        for number, held in enumerate(self.held):
            fresh = {row for row, version in held.source.versions.items() if version > self.compared_version}
            for row in fresh:
                held.dirty_since.setdefault(row, self.compared_version + 1)
                if held.wanted(row).tobytes() == held.row(row).tobytes():
                    del held.dirty_since[row]
            size = policy.row_bytes(held.form.spec)
            for row, since in sorted(held.dirty_since.items()):
                norm, before = held.norm(row), row in held.rows
                rows.append(DirtyRow(before, -norm, number, row, norm, since <= overdue, size))
        self.compared_version = self.version
        return rows


def norm_of(rows: Sequence[DirtyRow]) -> float:
    return math.sqrt(math.fsum(row.norm**2 for row in rows))


def _whole(source: PlainTable, form: TableForm) -> PlainHeld:
    held = PlainHeld(source, form)
    held.rows = {row: held.wanted(row) for row in source.rows}
    return held


def _top(rows: Sequence[DirtyRow], policy: Policy, share: Fraction) -> list[DirtyRow]:
    """The first rows of a group; `share` is that of a policy with a share."""
    if policy.top_k is None:
        return list(rows)
    return sorted(rows)[: math.ceil(share * len(rows)) if policy.top_k < 1 else int(policy.top_k)]


def _fitting(rows: set[DirtyRow], max_bytes: int | None) -> list[DirtyRow]:
    taken: list[DirtyRow] = []
    for row in sorted(rows, key=lambda row: (not row.overdue, row)):
        if max_bytes is not None and taken and sum(each.size for each in taken) + row.size > max_bytes:
            break
        taken.append(row)
    return taken
