"""Runs a module that ends itself with SIGKILL at a named step, once a file asks for it; other files set its clock
and slow down its disk.

python -m tests.soak.fuse FILE MODULE ARGUMENTS...
"""

import functools
import importlib
import inspect
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
# Where a process may be killed, and what is called there: of the service, of `deltasync restore`, of a rank and of
# a replica.
SERVICE_STEPS = {
    "publish": "deltasync.api.publish:add",
    "seal": "deltasync.model.model_store:ModelStore.seal",
    "commit": "deltasync.log.lmdb_store:LmdbStore._commit",
    "apply": "deltasync.model.applied_tables:AppliedTables.apply",
    "release": "deltasync.views.release_maker:ReleaseMaker._take",
    "release record": "deltasync.views.log:ViewLog.write",
    "ack": "deltasync.consumers.registry:ConsumerRegistry.acknowledge",
    "checkpoint": "deltasync.checkpoints.store:CheckpointStore.write",
    "checkpoint file": "deltasync.checkpoints.file_storage:Place.put",
    "checkpoint removal": "deltasync.checkpoints.file_storage:Place.remove",
    "truncation": "deltasync.log.lmdb_store:LmdbStore.truncate",
    "recovery": "deltasync.model.model:Model.recover",
    "loading": "deltasync.checkpoints.store:CheckpointStore.load",
    "backup": "deltasync.service.backup:BackupPlace.complete",
    "table record": "deltasync.model.model_store:ModelStore.describe",
}
RESTORE_STEPS = {"restore": "deltasync.service.restore:_restore_model"}
RANK_STEPS = {
    "publish": "deltasync.client.publisher:Publisher.publish",
    "journal": "tests.soak.journal:Journal.append",
}
REPLICA_STEPS = {
    "apply": "deltasync.client.subscriber:Subscriber._apply",
    "ack": "deltasync.client.subscriber:Subscriber._ack",
}
_STEPS = {
    "deltasync": SERVICE_STEPS | RESTORE_STEPS,
    "tests.soak.rank": RANK_STEPS,
    "tests.soak.replica": REPLICA_STEPS,
}
# For so long other threads go on before a process dies: what should have waited for the step is seen outside.
_GOES_ON_SECONDS = 0.05
# What puts something on the service's disk.
_WRITES = {"commit", "checkpoint file"}


def clock_file(fuse: Path) -> Path:
    """Where a process with a fuse is told by how many seconds its clock is off, while that is there."""
    return fuse.with_suffix(".clock")


def shifted_clocks(
    file: Path, seconds: Callable[[], float], nanoseconds: Callable[[], int]
) -> tuple[Callable[[], float], Callable[[], int]]:
    """Clocks that are off by as many seconds as a file says."""

    def off() -> float:
        try:
            return float(file.read_text())
        except FileNotFoundError:
            return 0.0

    return lambda: seconds() + off(), lambda: nanoseconds() + int(off() * 1e9)


def slow_file(file: Path) -> Path:
    """Where a process with a fuse is told how much longer its writes take, in seconds, while that is there."""
    return file.with_suffix(".slow")


def blown(file: Path) -> Path:
    """What a fuse leaves in the place of its file when it has killed its process."""
    return file.with_suffix(".blown")


class Fuse:
    """Kills this process at the step that its file names, before or after what is done there."""

    def __init__(
        self, file: Path, kill: Callable[[int, int], None] = os.kill, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._file, self._kill, self._sleep = file, kill, sleep

    def put_into(self, steps: dict[str, str]) -> None:
        """Look at the file at each of these steps."""
        for name, place in steps.items():
            owner, attribute = owner_of(place)
            setattr(owner, attribute, self._wrapped(name, getattr(owner, attribute)))

    def _wrapped(self, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(step):

            @functools.wraps(step)
            async def awaited(*args: Any, **named: Any) -> Any:
                self._reach(name)
                result = await step(*args, **named)
                self._burn(f"after {name}")
                return result

            return awaited

        @functools.wraps(step)
        def called(*args: Any, **named: Any) -> Any:
            self._reach(name)
            result = step(*args, **named)
            self._burn(f"after {name}")
            return result

        return called

    def _reach(self, name: str) -> None:
        self._burn(f"before {name}")
        if name in _WRITES:
            with suppress(FileNotFoundError):
                self._sleep(float(slow_file(self._file).read_text()))

    def _burn(self, moment: str) -> None:
        try:
            wanted = self._file.read_text()
        except FileNotFoundError:
            return
        if wanted == moment:
            self._file.rename(blown(self._file))
            self._sleep(_GOES_ON_SECONDS)
            self._kill(os.getpid(), signal.SIGKILL)


def owner_of(place: str) -> tuple[Any, str]:
    """The object whose attribute a step is, and the name of that."""
    module, _, path = place.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    getattr(owner, attribute)
    return owner, attribute


def main() -> None:
    """Run a module with a fuse."""
    file, module, *arguments = sys.argv[1:]
    # Before the module imports them.
    time.time, time.time_ns = shifted_clocks(clock_file(Path(file)), time.time, time.time_ns)
    Fuse(Path(file)).put_into(_STEPS[module])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
