"""What is written down of a view, in the log and in checkpoints: part of the on-disk format.

    view/CONSUMER        small record: the ids of the view's history and of its model's
    heads/CONSUMER       one record a release, by number: what the release is. It exists once this is there.
    releases/CONSUMER    by release, slot and index: ids of the rows that a release took of tables that were there
                         before. Values are not written down: they are those of the model at the head's version.

The head of a release is JSON, made of `head_record` and

    after          seal of the release before it; 0 = it is the first
    from           version at which rows were last compared before this release. If it is later than the version of
                   the release before, that comparison found nothing dirty.
    compared       version at which nothing was dirty after it; 0 = not known of any
    statistics     see `statistics_record`
    rows           how many rows it took, by slot; 0 of tables that it made
    tables         see `table_record`, by slot; only where they are not those of the release before
    first_version  the version up to which the model's numbers are the view's
"""

from collections.abc import Mapping
from typing import Any

from deltasync.feeds.frozen_release import Head
from deltasync.feeds.statistics import Amount, ReleaseStatistics
from deltasync.storage.records import event_time_record
from deltasync.views.table import ViewTable


def view_name(consumer: str) -> str:
    """The name of the record of a consumer's view."""
    return f"view/{consumer}"


def releases_stream(consumer: str) -> str:
    """The stream of the ids of its releases."""
    return f"releases/{consumer}"


def heads_stream(consumer: str) -> str:
    """The stream of the heads of its newest releases."""
    return f"heads/{consumer}"


def head_record(head: Head) -> dict[str, Any]:
    """The record of a head."""
    record = {
        "number": head.number,
        "version": head.version,
        "step": head.step,
        "step_end_unix_ns": head.step_end_unix_ns,
        "seal": head.seal,
    }
    return record | event_time_record(head.event_time_unix_ns)


def head_of_record(record: Mapping[str, Any]) -> Head:
    """The head that a record describes."""
    return Head(
        number=record["number"],
        version=record["version"],
        step=record["step"],
        step_end_unix_ns=record["step_end_unix_ns"],
        event_time_unix_ns=record.get("event_time_unix_ns"),
        seal=record["seal"],
    )


def statistics_record(statistics: ReleaseStatistics) -> dict[str, Any]:
    """The record of a release's statistics."""
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
    """The statistics that a record describes."""
    return ReleaseStatistics(
        number=record["number"],
        version=record["version"],
        made_unix_ns=record["made_unix_ns"],
        taken=Amount(record["rows"], record["bytes"], record["norm"]),
        backlog=Amount(record["left_rows"], record["left_bytes"], record["left_norm"]),
        reason=record["reason"],
    )


def table_record(table: ViewTable) -> dict[str, Any]:
    """The record of what a table of a view is."""
    delivery = table.delivery
    return {
        "table": delivery.spec.name,
        "rows": delivery.spec.rows,
        "value_type": delivery.value_type and delivery.value_type.value,
        "mode": delivery.mode.value,
        "source": table.source.removed_before,
        "replaces": table.sent.removed_before,
        "born": table.born,
        "stamp": table.stamp,
    }
