"""Those who use the service as it is meant to be used, beside an attack: a trainer and a replica.

python -m tests.attacks.honest GRPC       until a line, or the end, of its standard input; then it tells JSON
"""

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import numpy as np
from tests.attacks.target import CONSUMER, MODEL

from deltasync.client import (
    DeltasyncError,
    Endpoint,
    NumpyTarget,
    Part,
    Publisher,
    PublisherOptions,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)

TABLE = TableSpec("honest", 20_000, 16)
_ROWS_OF_A_CUT, _PACE_SECONDS = 200, 0.05
_PATIENCE_SECONDS = 30.0


class Trainer:
    """Publishes a small cut every now and then."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.rows = np.random.default_rng(0).normal(size=(TABLE.rows, TABLE.dim)).astype(np.float32)
        options = PublisherOptions(service=endpoint, model=MODEL, run="honest", run_started_unix_ns=time.time_ns())
        self._publisher = Publisher(options, [TABLE], [Shard.whole(TABLE)])
        self._random = np.random.default_rng(1)
        self._step = 0
        self.cuts: list[tuple[float, float]] = []
        self.failure, self.version = "", 0

    def publish(self) -> None:
        """Publish one cut, and note how long that took."""
        self._step += 1
        first = self._step == 1
        ids = np.arange(TABLE.rows) if first else self._random.choice(TABLE.rows, _ROWS_OF_A_CUT, replace=False)
        ids.sort()
        if not first:
            self.rows[ids] = self._random.normal(size=(len(ids), TABLE.dim))
        rows = RowBatch(Shard.whole(TABLE), ids, self.rows[ids])
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=[rows], full=first)
        begun = time.monotonic()
        try:
            position = self._publisher.publish(part).result(_PATIENCE_SECONDS)
        except (DeltasyncError, TimeoutError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        else:
            self.version = position.number
        self.cuts.append((begun, time.monotonic() - begun))

    def close(self) -> None:
        self._publisher.close()


def main(address: str) -> None:
    endpoint = Endpoint(address, os.environ.get("ATTACKS_TOKEN", ""))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(sys.stdin.readline()), daemon=True).start()
    trainer, target = Trainer(endpoint), NumpyTarget()
    options = SubscriberOptions(service=endpoint, consumer=CONSUMER, replica="honest")
    with Subscriber(options, target) as replica:
        trainer.publish()
        replica.wait_for(trainer.version, _PATIENCE_SECONDS)
        print("ready", flush=True)  # noqa: T201
        while lines.empty() and not trainer.failure:
            begun = time.monotonic()
            trainer.publish()
            time.sleep(max(0.0, begun + _PACE_SECONDS - time.monotonic()))
        lines.get()
        print(json.dumps(_told(trainer, replica, target)), flush=True)  # noqa: T201
    trainer.close()


def _told(trainer: Trainer, replica: Subscriber, target: NumpyTarget) -> dict[str, Any]:
    try:
        replica.wait_for(trainer.version, _PATIENCE_SECONDS)
        refusal = ""
    except (DeltasyncError, TimeoutError) as error:
        refusal = f"{type(error).__name__}: {error}"
    same = bool(np.array_equal(target.tables.get(TABLE.name, np.zeros(0)), trainer.rows))
    return {"cuts": trainer.cuts, "failure": trainer.failure, "replica": refusal, "same_rows": same}


if __name__ == "__main__":
    main(sys.argv[1])
