"""The service begins again from a backup, or from a directory that was put back by hand; and backups that are not
whole.
"""

import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.soak.faults.choice import NotDone, everywhere
from tests.soak.faults.disk import flip_bit
from tests.soak.leftovers import leftovers
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, SoakFailed, World

from deltasync.base.errors import StorageFailed
from deltasync.service.restore import restore


def put_back(world: World, fault: Fault) -> Sequence[str]:
    """The service makes a backup, goes on for a while, and then begins again from that."""
    with _backup(world) as backup:
        _begin_again(world, fault, lambda: restore(backup, world.data_dir))
    return everywhere(world)


def put_back_after_kill(world: World, fault: Fault) -> Sequence[str]:
    """The same, and the first `deltasync restore` is killed: it is only run again."""
    command = ["restore", "--data-dir", str(world.data_dir)]
    moment, ended = f"{'before' if fault.pick < 0.5 else 'after'} restore", list[int]()
    with _backup(world) as backup:

        def restore_twice() -> None:
            ended.append(world.run_with_fuse("restore", [*command, str(backup)], moment))
            restore(backup, world.data_dir)

        _begin_again(world, fault, restore_twice)
    if ended != [-signal.SIGKILL]:
        raise NotDone(f"restore was not killed, and ended with status {ended[0]}")
    return everywhere(world)


def put_back_by_hand(world: World, fault: Fault) -> Sequence[str]:
    """A copy of the data directory of the stopped service takes its place after a while, without `restore`."""
    with world.alone, world.scratch() as folder:
        copy = folder / "copy"
        world.crew.restart(SERVICE, between=lambda: shutil.copytree(world.data_dir, copy))

        def rename() -> None:
            copy.rename(world.data_dir)
            world.note_put_back()

        _begin_again(world, fault, rename)
    return everywhere(world)


def damage_backup(world: World, fault: Fault) -> Sequence[str]:
    """A bit of a backup flips: restore refuses it, and leaves nothing."""
    with _backup(world) as backup:
        flipped, data_dir = flip_bit(backup, fault.pick), backup.with_name("restored")
        try:
            restore(backup, data_dir)
        except StorageFailed:
            if data_dir.exists() and any(data_dir.iterdir()):
                raise SoakFailed(f"restore has refused a backup, and left something in {data_dir}") from None
        else:
            raise SoakFailed(f"restore has taken a backup with another bit in {flipped}")
    return []


def make_and_restore(world: World, _: Fault) -> None:
    """Make a backup into one folder until it is complete, though the service may be killed; what it restores is
    whole.
    """
    with _backup(world) as backup:
        data_dir = backup.with_name("restored")
        restore(backup, data_dir)
        if left := leftovers(data_dir):
            raise SoakFailed(f"a restored backup has files that nothing uses: {', '.join(left)}")


@contextmanager
def _backup(world: World) -> Iterator[Path]:
    with world.alone, world.scratch() as folder:
        backup = folder / "backup"
        world.back_up(backup)
        yield backup


def _begin_again(world: World, fault: Fault, fill: Callable[[], object]) -> None:
    """Kill the service after a while, and start it on what `fill` puts in the place of its data directory."""
    time.sleep(fault.seconds)
    lost = world.data_dir.with_name("lost")

    def replace() -> None:
        world.drop_what_is_under_way()
        world.data_dir.rename(lost)
        try:
            fill()
        finally:
            shutil.rmtree(lost)

    world.crew.restart(SERVICE, signal.SIGKILL, replace)
    world.resume_all()
