"""Playing a schedule: faults in threads of their own, while the processes are watched."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from tests.soak.faults.choice import NotDone
from tests.soak.faults.kinds import KINDS, SUDDEN
from tests.soak.recovery import Happened
from tests.soak.schedule import Fault
from tests.soak.world import World

from deltasync.base.errors import DeltasyncError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
# A fault waits for the service, or for its moment, no longer than this.
_LAST_SECONDS = 240.0


class Player:
    """Does the faults of a schedule to a world."""

    def __init__(self, world: World) -> None:
        self.happened: list[Happened] = []
        self.missed: list[str] = []
        self._world = world
        self._threads: list[threading.Thread] = []

    def play(self, faults: Sequence[Fault], say: Callable[[str], None]) -> None:
        """Begin every fault at its time, and wait until all are over."""
        began = time.monotonic()
        for fault in faults:
            self._watch(lambda fault=fault: time.monotonic() >= began + fault.at)  # type: ignore[misc]
            say(f"{fault.at:6.1f} s  {fault.kind}")
            self._begin(fault)
        deadline = time.monotonic() + _LAST_SECONDS
        self._watch(lambda: not any(each.is_alive() for each in self._threads) or time.monotonic() > deadline)
        self._world.crew.thaw()
        for thread in self._threads:
            if thread.is_alive():
                self._world.crew.trouble(f"{thread.name} is not over")

    def _begin(self, fault: Fault) -> None:
        thread = threading.Thread(target=self._do, args=(fault,), name=fault.kind, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _do(self, fault: Fault) -> None:
        begun = time.time_ns()
        try:
            models = KINDS[fault.kind](self._world, fault)
        except NotDone as error:
            self.missed.append(f"{fault.kind}: {error}")
        except DeltasyncError as error:
            self._world.crew.trouble(f"{fault.kind}: {error}")
        except Exception as error:
            logger.exception("fault %r", fault.kind)
            self._world.crew.trouble(f"{fault.kind}: {type(error).__name__}: {error}")
        else:
            ended, replicas = time.time_ns(), self._world.fleet.replicas_of(models)
            self.happened.append(Happened(fault.kind, ended if fault.kind in SUDDEN else begun, ended, replicas))

    def _watch(self, over: Callable[[], bool]) -> None:
        while not over():
            time.sleep(_LOOK_SECONDS)
