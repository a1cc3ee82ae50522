"""What a snapshot is made of: arrays of a model and of its views, which go on changing, and what they are at."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from deltasync.core.table_records import spec_record
from deltasync.feeds.frozen_release import Head
from deltasync.feeds.model import Model
from deltasync.views.records import table_record
from deltasync.views.view import View


@dataclass(frozen=True)
class SourceTable:
    """A table: what is written down of it, and its arrays, which have as many rows."""

    record: Mapping[str, Any]
    arrays: tuple[NDArray[Any], ...]

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self.arrays[0])


@dataclass(frozen=True)
class SourceView:
    """A view, as of a release or later."""

    record: Mapping[str, Any]
    head: Head
    tables: tuple[SourceTable, ...]


@dataclass(frozen=True)
class Source:
    """A model, as of a version or later, with the views of its consumers."""

    model: str
    history: str
    head: Head
    tables: tuple[SourceTable, ...]
    views: Mapping[str, SourceView]


def source_of(model: Model, views: Mapping[str, View]) -> Source | None:
    """What there is of a model, on its thread; None if nothing is published.

    Raises:
        ServiceUnavailable: its tables are at no version now.
    """
    if (seal := model.applied) is None:
        return None
    tables = tuple(
        SourceTable(
            spec_record(table.spec) | {"columns": list(table.mapped.layout.columns)}, table.mapped.files.arrays
        )
        for table in model.tables
    )
    return Source(model.name, model.history, Head.of(seal), tables, _views(views))


def _views(views: Mapping[str, View]) -> dict[str, SourceView]:
    found = {}
    for name, view in views.items():
        if view.state.head:
            tables = tuple(SourceTable(table_record(each), each.files.arrays) for each in view.state.tables)
            found[name] = SourceView(view.record(), view.state.head, tables)
    return found
