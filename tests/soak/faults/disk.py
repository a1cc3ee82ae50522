"""The service's disk: full and slow; and bits that have flipped, there and in its memory."""

import logging
import random
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from tests.soak.faults.choice import NotDone, everywhere
from tests.soak.fuse import slow_file
from tests.soak.journal import replace_file
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, World
from tests.support.memory_flips import flip_in_memory

from deltasync.log.data_directory import CHECKPOINTS

logger = logging.getLogger(__name__)

_WRITE_SECONDS = 0.05
_ROW_BYTES, _TRIES, _NEWEST = 16, 20, 3


def flip_bit(folder: Path, pick: float) -> str:
    """Flip a bit of some file below a folder, rather of a large one; which, and at what byte."""
    rng = random.Random(pick)  # to be repeated, not to be secret
    sizes = dict[Path, int]()
    for file in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # The service removes old ones.
            sizes[file] = file.stat().st_size if file.is_file() else 0
    while any(sizes.values()):
        [file] = rng.choices(list(sizes), list(sizes.values()))
        del sizes[file]
        with suppress(FileNotFoundError), file.open("r+b") as opened:
            content = opened.read()
            used = np.flatnonzero(np.frombuffer(content, np.uint8))  # Zeros may never be read.
            if len(used):
                at = int(used[rng.randrange(len(used))])
                opened.seek(at)
                opened.write(bytes([content[at] ^ 1 << rng.randrange(8)]))
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
    """A bit of a file of checkpoints is another one when the service starts again.

    That costs at most the rows of a chunk, which come from a copy or from trainers, and no version.
    """
    with world.alone:  # No kept version is followed that may be damaged.
        world.crew.restart(SERVICE, between=lambda: _flip_checkpoint(world, fault))
        world.await_there(world.ready, "/readyz of a service with a damaged checkpoint")
    return everywhere(world)


def flip_under_service(world: World, fault: Fault) -> Sequence[str]:
    """A bit of a file of checkpoints flips while the service uses it, which goes on: it has the rows in memory.

    For a while, it may write and copy checkpoints that build upon that file. `fsck` finds it, and a later start.
    """
    with world.alone:  # As above; and a version that is kept meanwhile may be damaged, too.
        _flip_checkpoint(world, fault)
        time.sleep(fault.seconds)
        world.call(lambda admin: admin.fsck())
        world.await_there(world.ready, "/readyz of a service with a damaged checkpoint, which it does not read")
    return everywhere(world)


def _flip_checkpoint(world: World, fault: Fault) -> None:
    logger.info("a bit is flipped: %s", flip_bit(world.data_dir / CHECKPOINTS, fault.pick))


def flip_row(world: World, fault: Fault) -> Sequence[str]:
    """A bit of some rows is another one in the service's memory, which has to find that."""
    try:
        pid, rows = world.crew.pid(SERVICE), _row_bytes(world.data_dir / CHECKPOINTS, fault.pick)
        if not sum(flip_in_memory(pid, each) for each in rows):
            raise NotDone("the service has none of the rows in memory that its checkpoints have")
    except (OSError, ProcessLookupError) as error:
        raise NotDone(f"the memory of the service cannot be changed: {error}") from error
    world.call(lambda admin: admin.fsck())  # It finds what no replica happens to be sent.
    world.await_there(world.ready, "/readyz of a service with a row in memory that was damaged")
    return everywhere(world)


def _row_bytes(checkpoints: Path, pick: float) -> Iterator[bytes]:
    """Bytes of some rows of the newest checkpoints. Without zeros, so that they are of no ids and no stamps."""
    rng = random.Random(pick)  # to be repeated, not to be secret
    files = sorted((each for each in checkpoints.glob("*/data/*-000000")), key=lambda each: each.name)[-_NEWEST:]
    for _ in range(_TRIES if files else 0):  # Rows may have changed since.
        try:
            content = np.fromfile(rng.choice(files), np.uint8)
        except FileNotFoundError:
            continue
        starts = np.flatnonzero(np.lib.stride_tricks.sliding_window_view(content, _ROW_BYTES).all(axis=1))
        if len(starts):
            at = int(starts[rng.randrange(len(starts))])
            yield content[at : at + _ROW_BYTES].tobytes()
