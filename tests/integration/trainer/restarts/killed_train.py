"""`deltasync.trainer.example.train`, with every rank killed after a step, once there is a
checkpoint, and a version that it has published.

python killed_train.py STEP CHECKPOINTS HTTP OPTION...
"""

import os
import signal
import sys
import time
from pathlib import Path

from deltasync.client.admin import Admin
from deltasync.trainer.checkpoints import checkpoints_in
from deltasync.trainer.example.train import main
from deltasync.trainer.sync import DeltaSync


def die_after(step: int, checkpoints: Path, http: str) -> None:
    original, before = DeltaSync.step, head_of(http)

    def killed(sync: DeltaSync, event_time_unix_ns: int | None = None) -> None:
        original(sync, event_time_unix_ns)
        if sync.tracker.steps >= step:
            while not checkpoints_in(checkpoints) or head_of(http) == before:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    DeltaSync.step = killed  # type: ignore[method-assign, assignment]


def head_of(http: str) -> int:
    head: int = Admin(http).consumer("predictors")["head"]
    return head


if __name__ == "__main__":
    die_after(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    main([*sys.argv[4:], "--checkpoint", sys.argv[2]])
