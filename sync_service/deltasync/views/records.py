"""The small records of a view in the log: their names and keys are part of the data directory's format."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from deltasync.feeds.frozen_release import Head
from deltasync.feeds.statistics import Amount, ReleaseStatistics
from deltasync.storage.log_store import LogStore
from deltasync.storage.records import event_time_record, reading, unpack_json
from deltasync.storage.table_files import Place
from deltasync.views.table import ViewTable


def view_name(consumer: str) -> str:
    """The name of the record of a consumer's view."""
    return f"view/{consumer}"


def release_name(consumer: str) -> str:
    """The name of the record of its newest release."""
    return f"release/{consumer}"


def releases_stream(consumer: str) -> str:
    """The stream of the rows of its releases, by release, slot and index."""
    return f"releases/{consumer}"


def heads_stream(consumer: str) -> str:
    """The stream of the heads of its newest releases, by release."""
    return f"heads/{consumer}"


def recorded_view(log: LogStore, consumer: str) -> Mapping[str, Any] | None:
    """What is written down of a consumer's view; None if it has none.

    Raises:
        StorageFailed: the record is damaged.
    """
    return _recorded(log, view_name(consumer))


def recorded_release(log: LogStore, consumer: str) -> Mapping[str, Any] | None:
    """What is written down of its newest release; None if there is none.

    Raises:
        StorageFailed: the record is damaged.
    """
    return _recorded(log, release_name(consumer))


def _recorded(log: LogStore, name: str) -> Mapping[str, Any] | None:
    record = log.items(name).get("")
    with reading(f"record {name}"):
        return None if record is None else unpack_json(record)


def head_record(head: Head) -> dict[str, Any]:
    """The head, as it is written down."""
    record = {
        "number": head.number,
        "version": head.version,
        "step": head.step,
        "step_end_unix_ns": head.step_end_unix_ns,
        "seal": head.seal,
    }
    return record | event_time_record(head.event_time_unix_ns)


def head_of_record(record: Mapping[str, Any]) -> Head:
    """The head that was written down."""
    return Head(
        number=record["number"],
        version=record["version"],
        step=record["step"],
        step_end_unix_ns=record["step_end_unix_ns"],
        event_time_unix_ns=record.get("event_time_unix_ns"),
        seal=record["seal"],
    )


def statistics_record(statistics: ReleaseStatistics) -> dict[str, Any]:
    """The statistics of a release, as they are written down."""
    taken, backlog = statistics.taken, statistics.backlog
    return {
        "number": statistics.number,
        "version": statistics.version,
        "made_unix_ns": statistics.made_unix_ns,
        "rows": taken.rows,
        "bytes": taken.bytes,
        "norm": taken.norm,
        "reason": statistics.reason,
        "left_rows": backlog.rows,
        "left_bytes": backlog.bytes,
        "left_norm": backlog.norm,
    }


def statistics_of_record(record: Mapping[str, Any]) -> ReleaseStatistics:
    """The statistics that were written down."""
    return ReleaseStatistics(
        number=record["number"],
        version=record["version"],
        made_unix_ns=record["made_unix_ns"],
        taken=Amount(record["rows"], record["bytes"], record["norm"]),
        backlog=Amount(record["left_rows"], record["left_bytes"], record["left_norm"]),
        reason=record["reason"],
    )


def table_record(table: ViewTable) -> dict[str, Any]:
    """What a table of a view is, as it is written down."""
    place = table.files.place
    record = {
        "table": table.delivery.spec.name,
        "value_type": table.delivery.value_type and table.delivery.value_type.value,
        "mode": table.delivery.mode.value,
        "folder": place.folder.name,
        "rows": table.delivery.spec.rows,
    }
    record |= {"replaces": table.sent.removed_before} if table.sent.removed_before else {}
    record |= {"removed_before": table.source.removed_before} if table.source.removed_before else {}
    return record | ({} if place.offset is None else {"offset": place.offset})


def is_of_removed(record: Mapping[str, Any], tables: Container[str], removed: Mapping[str, int]) -> bool:
    """Whether a table that was written down is of one that its model has no more, though it may have another of
    that name.

    Args:
        record: what was written down.
        tables: the names of those that the model has.
        removed: at which version one was removed, by its name.
    """
    name = record["table"]
    return name not in tables or record.get("removed_before", 0) != removed.get(name, 0)


def place_of_record(record: Mapping[str, Any], directory: Path) -> Place:
    """Where the files of a table are that was written down, below the view's folder."""
    return Place(directory / record["folder"], record.get("offset"))
