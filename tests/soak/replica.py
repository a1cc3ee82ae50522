"""A replica: takes releases into a target until SIGTERM, then writes down what that holds.

python -m tests.soak.replica --service localhost:50051 --consumer all --replica a --folder /tmp/soak
"""

import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from tests.soak.journal import Journal, stop_on_signals
from tests.soak.stores import STORES, Store

from deltasync.base.logs import log_to_stderr
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.client import Release, Subscriber, SubscriberOptions, Target
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec

_CHECK_SECONDS = 0.2


class JournalingTarget:
    """A store's target, and a journal of what it was given."""

    def __init__(self, store: Store, journal: Journal, *, whole: bool) -> None:
        """Versions are looked at for rows of two steps where they come `whole`."""
        self._store, self._journal, self._whole = store, journal, whole

    def apply(self, release: Release) -> None:
        self._store.target.apply(release)
        at, mixed = release.position, self._store.mixed(release) if self._whole else ""
        self._journal.append(
            unix_ns=time.time_ns(),
            step_end_unix_ns=release.step_end_unix_ns,
            history=at.history,
            number=at.number,
            version=release.version,
            resync=release.resync,
            bytes=release.bytes,
            mixed=mixed,
        )


class ReadableJournalingTarget(JournalingTarget):
    """The same of a target whose rows can be read back."""

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        return self._store.read(table, ids)


def replica_journal(folder: Path, name: str) -> Path:
    return folder / f"replica-{name}.jsonl"


def held_file(folder: Path, name: str) -> Path:
    """What a replica held in the end, as `Store.held` tells it."""
    return folder / f"held-{name}.npz"


def _target(store: Store, journal: Journal, *, whole: bool) -> Target:
    readable = hasattr(store.target, "read")
    kind = ReadableJournalingTarget if readable else JournalingTarget
    return kind(store, journal, whole=whole)


@click.command(context_settings=CONTEXT)
@service_options(default=None)
@click.option("--consumer", required=True, help="The consumer it belongs to.")
@click.option("--replica", required=True, help="Its name.")
@click.option("--store", type=click.Choice(list(STORES)), default="numpy", help="What rows are put into.")
@click.option("--redis", "socket", default="", help="Socket of a server, for rows in a store.")
@click.option("--whole", is_flag=True, help="Its releases are whole versions of a plain trainer.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Folder for journals and rows.")
def main(consumer: str, replica: str, store: str, socket: str, whole: bool, folder: Path, **settings: Any) -> None:
    """Follow a consumer until SIGTERM."""
    log_to_stderr()
    stop = stop_on_signals()
    ours, journal = STORES[store](replica, socket), Journal(replica_journal(folder, replica))
    target = _target(ours, journal, whole=whole)
    options = SubscriberOptions(consumer=consumer, replica=replica, held=ours.position, **settings)
    with Subscriber(options, target) as subscriber:
        while not stop.wait(_CHECK_SECONDS):
            subscriber.check()
        subscriber.check()
    np.savez(held_file(folder, replica), allow_pickle=False, **ours.held())
    journal.close()


if __name__ == "__main__":
    main()
