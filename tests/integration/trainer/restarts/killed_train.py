"""`deltasync.trainer.train` of which every rank is killed after a step, once there is a checkpoint.

python killed_train.py STEP CHECKPOINTS OPTION...
"""

import os
import signal
import sys
import time
from pathlib import Path

from deltasync.trainer.clicks.checkpoints import checkpoints_in
from deltasync.trainer.sync import DeltaSync
from deltasync.trainer.train import main


def die_after(step: int, checkpoints: Path) -> None:
    original = DeltaSync.step

    def killed(sync: DeltaSync, event_time_unix_ns: int | None = None) -> None:
        original(sync, event_time_unix_ns)
        if sync.tracker.steps >= step:
            while not checkpoints_in(checkpoints):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    DeltaSync.step = killed  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    die_after(int(sys.argv[1]), Path(sys.argv[2]))
    main([*sys.argv[3:], "--checkpoint", sys.argv[2]])
