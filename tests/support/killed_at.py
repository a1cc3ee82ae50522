"""Backs up or restores, and kills its own process at a step: `python killed_at.py STEP WHAT FROM TO`.

A step opens, makes, moves or removes something in the folder TO.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.local_service import back_up

from deltasync.service.restore import restore

_STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def killer(step: int, folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that kills the process at a step."""
    begun = 0

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal begun
        if event in _STEPS and str(arguments[0]).startswith(folder):
            begun += 1
            if begun >= step:
                os.kill(os.getpid(), signal.SIGKILL)

    return look


def main(step: str, what: str, source: str, target: str) -> None:
    sys.addaudithook(killer(int(step), target))
    if what == "backup":
        back_up(Path(source), Path(target))
    else:
        restore(source, Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
