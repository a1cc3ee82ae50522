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
from tests.attacks.target import CONSUMER
from tests.support.fleet import Trainer

from deltasync.client import (
    DeltasyncError,
    Endpoint,
    NumpyTarget,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)

TABLE = TableSpec("honest", 20_000, 16)
_ROWS_OF_A_CUT, _PACE_SECONDS = 200, 0.05
_PATIENCE_SECONDS = 30.0


class HonestTrainer(Trainer):
    """Publishes a small cut every now and then.

    Attributes:
        cuts: when each was begun, seconds by `time.monotonic`, and how many seconds it took.
        failure: why it has ended; empty while it goes on.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, [TABLE], run="honest", started=time.time_ns())
        self.wait_seconds = _PATIENCE_SECONDS
        self.cuts: list[tuple[float, float]] = []
        self.failure, self.version = "", 0

    def publish(self) -> None:
        """Publish one cut, and note how long that took."""
        begun = time.monotonic()
        try:
            position = self.change(_ROWS_OF_A_CUT) if self.version else self.publish_all()
        except (DeltasyncError, TimeoutError) as error:
            self.failure = f"{type(error).__name__}: {error}"
        else:
            self.version = position.number
        self.cuts.append((begun, time.monotonic() - begun))


def main(address: str) -> None:
    endpoint = Endpoint(address, os.environ.get("ATTACKS_TOKEN", ""))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(sys.stdin.readline()), daemon=True).start()
    target = NumpyTarget()
    options = SubscriberOptions(service=endpoint, consumer=CONSUMER, replica="honest")
    with HonestTrainer(endpoint) as trainer, Subscriber(options, target) as replica:
        trainer.publish()
        replica.wait_for(trainer.version, _PATIENCE_SECONDS)
        print("ready", flush=True)  # noqa: T201
        while lines.empty() and not trainer.failure:
            begun = time.monotonic()
            trainer.publish()
            time.sleep(max(0.0, begun + _PACE_SECONDS - time.monotonic()))
        lines.get()
        print(json.dumps(_told(trainer, replica, target)), flush=True)  # noqa: T201


def _told(trainer: HonestTrainer, replica: Subscriber, target: NumpyTarget) -> dict[str, Any]:
    try:
        replica.wait_for(trainer.version, _PATIENCE_SECONDS)
        refusal = ""
    except (DeltasyncError, TimeoutError) as error:
        refusal = f"{type(error).__name__}: {error}"
    same = bool(np.array_equal(target.tables.get(TABLE.name, np.zeros(0)), trainer.rows[TABLE.name]))
    return {"cuts": trainer.cuts, "failure": trainer.failure, "replica": refusal, "same_rows": same}


if __name__ == "__main__":
    main(sys.argv[1])
