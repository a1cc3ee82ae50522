"""A field that is declared in a record is shown wherever people and programs look."""

from collections import Counter
from dataclasses import asdict, dataclass

import click
from pydantic import TypeAdapter

from deltasync.cli.output import record_table, with_columns
from deltasync.status.metrics import record_metrics
from deltasync.status.records import (
    CheckpointStatus,
    ConsumerStatus,
    KeptStatus,
    ModelStatus,
    ProcessStatus,
    ReplicaStatus,
    TableLag,
    TableStatus,
    VersionStatus,
    VolumeStatus,
    columns,
    declared,
    part,
    shown,
)

RECORDS = (
    *(CheckpointStatus, ConsumerStatus, KeptStatus, ModelStatus, ProcessStatus, ReplicaStatus, TableLag),
    *(TableStatus, VersionStatus, VolumeStatus),
)


@dataclass(frozen=True)
class Inner:
    size: int = shown("Size of it.", "size", "bytes", gauge="size_bytes")


@dataclass(frozen=True)
class Outer:
    name: str = shown("Its name.", "name")
    inner: Inner | None = part(Inner, "outer_")  # noqa: RUF009  # declares a field


def test_one_declaration_is_column_key_metric_and_help() -> None:
    lines = [asdict(Outer("a", Inner(2000))), asdict(Outer("b", None))]
    assert [line.split() for line in record_table(Outer, lines)] == [["name", "size"], ["a", "2.0", "kB"], ["b"]]
    schema = TypeAdapter(Outer).json_schema()
    assert schema["$defs"]["Inner"]["properties"]["size"]["description"] == "Size of it."
    (metric,) = record_metrics(Outer, ["name"], [Outer("a", Inner(2000)), Outer("b", None)])
    assert (metric.name, metric.documentation) == ("deltasync_outer_size_bytes", "Size of it.")
    assert [(each.labels, each.value) for each in metric.samples] == [({"name": "a"}, 2000.0)]

    @click.command()
    @with_columns(Outer)
    def listed() -> None:
        """List them."""

    assert "size  Size of it." in (listed.help or "")


def test_no_record_has_a_title_twice() -> None:
    for record in RECORDS:
        assert max(Counter(each.shown.title for each in columns(record)).values(), default=1) == 1, record


def test_all_wordsrecord_metrics_are_sentences() -> None:
    for each in (path.shown for record in RECORDS for path in declared(record)):
        assert each.description.endswith(".")
        assert each.description[0].isupper() or each.description[0].isdigit()
