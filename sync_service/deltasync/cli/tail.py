"""`deltasync tail`."""

import contextlib
import json
import queue
import signal
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import click
import numpy as np

from deltasync.base.arguments import guest_name
from deltasync.base.words import counted, utc
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.cli.output import say, seconds, size
from deltasync.client.endpoint import Endpoint
from deltasync.client.subscriber import Subscriber, SubscriberOptions
from deltasync.client.targets.target import Release
from deltasync.core.rows import RowBatch

_WAIT_SECONDS = 0.5


class _Watched:
    """A target that queues a summary of each release and keeps no rows."""

    def __init__(self, rows: int) -> None:
        self.came = queue.SimpleQueue[dict[str, Any]]()
        self._rows = rows

    def apply(self, release: Release) -> None:
        """Queue the summary of a release."""
        self.came.put(summary(release, self._rows))


@contextlib.contextmanager
def goodbye_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C in the block, so that a replica can say goodbye. For the main thread."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(context_settings=CONTEXT)
@click.argument("consumer")
@click.option("--rows", type=click.IntRange(0), default=0, help="Rows to show of each table.")
@click.option("--count", type=click.IntRange(1), default=None, show_default="no end", help="Releases to show.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@service_options()
def tail(consumer: str, rows: int, count: int | None, as_json: bool, service: Endpoint) -> None:
    """Show the releases of CONSUMER as they arrive, until Ctrl-C. The first one has all current rows.

    Each release prints a line with its version or release number, rows, bytes, and delay since the end of the
    trainer's step, which compares two machines' clocks. A line for each table has its number of rows. --rows adds
    some ids with the L2 norm of the row or, in mode ids, of its change.

    The command connects as a replica, needs role subscribe, and keeps no rows. The lag lists it as a guest and
    does not count it.
    """
    target = _Watched(rows)
    options = SubscriberOptions(service=service, consumer=consumer, replica=guest_name("tail"), guest=True)
    subscriber = Subscriber(options, target)
    try:
        with contextlib.suppress(KeyboardInterrupt), goodbye_on_sigterm():
            _show(subscriber, target, count, as_json=as_json)
    finally:
        subscriber.close()


def summary(release: Release, rows: int) -> dict[str, Any]:
    """Summarise a release, with up to `rows` rows of each table.

    Each row has the norm of its values or, in a release without values, of its change.
    """
    tables = dict[str, dict[str, Any]]()
    for batch in release.rows:
        table = tables.setdefault(batch.table.name, {"rows": 0, "deleted": 0, "shown": []})
        table["rows"] += len(batch.ids)
        table["deleted"] += len(batch.ids) if batch.deleted else 0
        left = rows - len(table["shown"])
        table["shown"] += [] if left <= 0 else _shown(batch, left)
    return {
        "time": utc(time.time_ns()),
        "number": release.position.number,
        "version": release.version,
        "step": release.step,
        "everything": release.resync,
        "rows": sum(each["rows"] for each in tables.values()),
        "bytes": release.bytes,
        "seconds_since_step": max(0.0, round((time.time_ns() - release.step_end_unix_ns) / 1e9, 4)),
        "tables": tables,
    }


def _shown(batch: RowBatch, most: int) -> list[dict[str, Any]]:
    norms = _norms(batch, most)
    return [{"id": int(id_), "norm": norm} for id_, norm in zip(batch.ids[:most], norms, strict=False)]


def _norms(batch: RowBatch, most: int) -> list[float | None]:
    if batch.norms is not None:
        return [round(float(each), 6) for each in batch.norms[:most]]
    if batch.values.dtype.kind != "f":
        return [None] * most
    values = np.asarray(batch.values[:most], np.float64)
    return [round(float(each), 6) for each in np.linalg.norm(values, axis=1)]


def _show(subscriber: Subscriber, target: _Watched, count: int | None, *, as_json: bool) -> None:
    shown = 0
    while count is None or shown < count:
        subscriber.check()
        try:
            release = target.came.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            continue
        shown += 1
        say(*([json.dumps(release)] if as_json else _lines(release)))


def _lines(release: dict[str, Any]) -> list[str]:
    number = release["number"] if release["number"] != release["version"] else ""
    which = f"release {number} of version {release['version']}" if number else f"version {release['version']}"
    amount = f"{counted(release['rows'], 'row')}, {size(release['bytes'])}"
    fresh = f"{seconds(release['seconds_since_step'])} after step {release['step']}"
    lines = [f"{release['time']}  {which}{', everything' if release['everything'] else ''}: {amount}, {fresh}"]
    for name, table in release["tables"].items():
        deleted = f", {table['deleted']} of them deleted" if table["deleted"] else ""
        lines.append(f"  {name}: {counted(table['rows'], 'row')}{deleted}")
        lines += [f"    {row['id']:>12}  norm {row['norm']}" for row in table["shown"]]
    return lines
