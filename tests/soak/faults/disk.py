"""The service's disk: full, slow, and with a bit that has flipped."""

import random
import resource
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from tests.soak.faults.choice import NotDone, everywhere
from tests.soak.fuse import slow_file
from tests.soak.journal import replace_file
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, World

_WRITE_SECONDS = 0.05


def flip_bit(models: Path, pick: float) -> str:
    """Flip a bit of some file below a folder, where that has something; which, and at what byte."""
    rng = random.Random(pick)  # to be repeated, not to be secret
    files = [file for file in sorted(models.rglob("*")) if file.is_file()]
    while files:
        file = files.pop(rng.randrange(len(files)))
        used = np.flatnonzero(np.fromfile(file, np.uint8))  # There may be room for more rows.
        if len(used):
            at = int(used[rng.randrange(len(used))])
            with file.open("r+b") as opened:
                opened.seek(at)
                byte = opened.read(1)[0]
                opened.seek(at)
                opened.write(bytes([byte ^ 1 << rng.randrange(8)]))
            return f"{file.name}, byte {at}"
    return "nothing"


def fill_disk(world: World, fault: Fault) -> Sequence[str]:
    """The service can write no further than into half of its log's file; with room, it is ready by itself."""
    pid = world.crew.pid(SERVICE)
    try:
        half = (world.data_dir / "log" / "data.mdb").stat().st_size // 2
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (half, hard))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotDone("the service, or its directory, was away") from error
    time.sleep(fault.seconds)
    with suppress(ProcessLookupError):  # Another fault has killed it: the next one has room.
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    world.await_there(world.ready, "/readyz of a service whose disk has room again")
    return everywhere(world)


def slow_disk(world: World, fault: Fault) -> Sequence[str]:
    """Whatever the service puts on disk takes 50 ms longer."""
    file = slow_file(world.fuse(SERVICE))
    replace_file(file, str(_WRITE_SECONDS))
    time.sleep(2 * fault.seconds)
    file.unlink(missing_ok=True)  # Another fault of this kind may have been there.
    return everywhere(world)


def flip(world: World, fault: Fault) -> Sequence[str]:
    """A bit of a table's file is another one when the service starts again."""
    world.crew.restart(SERVICE, between=lambda: flip_bit(world.data_dir / "models", fault.pick))
    return everywhere(world)
