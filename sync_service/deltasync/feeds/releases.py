"""The releases that a feed's replicas are sent: shared among those that lack the same, in bounded room.

Threads. Releases are made on the thread that changes the tables; who asks for one waits in the event loop.

    the tables' thread    `_frozen`
    the event loop        all else
    any thread            `_spilled`
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

from deltasync.core.damage import DamagedRows
from deltasync.core.rows import RowBatch
from deltasync.core.signals import Signal, first_of
from deltasync.core.stamps import StampedTable
from deltasync.feeds.frozen_release import Chunk, FrozenRelease, Head, checksums_of, freeze
from deltasync.feeds.lack import Lack, replacing, size_after, size_of
from deltasync.feeds.repair import NO_REPAIR, Repair
from deltasync.feeds.scratch import FileBytes
from deltasync.wire.row_messages import chunked

# Of all releases together; beyond it they are kept in unlinked files, so that slow replicas cost no memory.
RELEASES_IN_MEMORY_BYTES = 64 << 20
# All these files of a feed take at most so many times the bytes of its tables.
SPILLED_TABLES = 2
# A replica may be sent so many times what it lacks, where another needs nearly the same rows.
SHARED_FACTOR = 2
# A release whose room others wait for is wanted back once it is so old.
LONGEST_SENT_SECONDS = 600.0
_LOOK_SECONDS = 5.0

_Key = tuple[int, Repair, int]
_Wanted = ref[asyncio.Future[FrozenRelease]]


@dataclass(frozen=True, eq=False)
class _Turn:
    """A place in the queue for room: who waits, and from which number on it lacks rows."""

    wanted: _Wanted
    after: int


class Releases:
    """The releases of one set of tables. Replicas that lack the same rows share one while any of them uses it.

    A release that does not fit into memory goes to a file. Replicas that lack nearly the same rows share that too:
    it may have more rows than one of them lacks, and bring it to a number that is not the newest any more. Where
    all files together would take too much, who comes later waits, one after the other, until there is room.

    Attributes:
        followed: somebody has asked for what the newest cut, or release, has brought.
        crowded: that there is no room for a release, in words; empty while there is. Any thread.
    """

    def __init__(
        self,
        run: Callable[..., Awaitable[Any]],
        state: Callable[[], tuple[Sequence[StampedTable], Head | None]],
        scratch: Path,
    ) -> None:
        """`run` runs a function on the thread that changes the tables, where `state` returns them and the head."""
        self._run = run
        self._state = state
        self._scratch = scratch
        self._frozen: list[ref[FrozenRelease]] = []
        self._found: WeakValueDictionary[_Key, asyncio.Future[FrozenRelease]] = WeakValueDictionary()
        self._tasks = set[asyncio.Task[None]]()
        self._newest: asyncio.Future[FrozenRelease] | None = None
        self._once = False
        self._queue: list[_Turn] = []
        self._freed, self._wakes = Signal(), 0
        self._spilled = FileBytes()
        self.followed = False
        self.crowded = ""

    @property
    def spilled_bytes(self) -> int:
        """Bytes of ids and values in files. Any thread."""
        return self._spilled.total

    def get(self, after: int, repair: Repair, head: int) -> asyncio.Future[FrozenRelease]:
        """The rows stamped after `after`, and those of a repair, while the head is `head`: all up to there or,
        where one is shared, up to some number after `after`. Who drops the future does not wait any more.
        """
        key = (after, repair, head)
        self.followed |= after == head - 1
        found = self._found.get(key)
        if found is None or _failed(found):
            found = self._found[key] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._find(ref(found), after, repair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._once and found is self._newest:
            self._newest = None
        return found

    def have(self, release: FrozenRelease | None, head: int, *, once: bool = False) -> None:
        """Have what a replica at the number before `head` lacks, which was made of the rows that came with `head`:
        until the next one, or, `once`, until a replica takes it, and as long as any uses it.
        """
        self._newest, self._once, self.followed = None, once, False
        if release:
            self._newest = self._found[head - 1, NO_REPAIR, head] = asyncio.get_running_loop().create_future()
            self._newest.set_result(release)

    def forget(self) -> None:
        """Have nothing ready that was made of other tables than there are now."""
        self._found.clear()
        self._newest, self.followed = None, False

    async def share_no_more(self) -> None:
        """Have nobody who asks from now on sent what others are sent already, of the tables as they were."""
        await self._run(self._close_spilled)
        self._found.clear()  # After it: of what was asked for meanwhile, too.

    def drop_newest(self) -> None:
        """Keep nothing that no replica uses."""
        self._newest = None

    async def _find(self, wanted: _Wanted, after: int, repair: Repair) -> None:
        try:
            release = await self._freeze_in_turn(wanted, after, repair)
        except Exception as error:  # noqa: BLE001  # handed over to whoever waits for the release
            if (found := wanted()) and not found.done():
                found.set_exception(error)
        else:
            if release and (found := wanted()) and not found.done():
                found.set_result(release)

    async def _freeze_in_turn(self, wanted: _Wanted, after: int, repair: Repair) -> FrozenRelease | None:
        """The release, once there is room; None if nobody waits for it any more."""
        turn, freed = _Turn(wanted, after), partial(_call_in, asyncio.get_running_loop(), self._wake)
        self._queue.append(turn)
        try:
            while wanted() is not None:
                woken = self._wakes
                afters = [each.after for each in self._queue] if self._queue[0] is turn else None
                release: FrozenRelease | None = await self._run(self._freeze, after, repair, afters, freed)
                if release:
                    return release
                if afters:
                    self.crowded = f"releases that are still sent take {self.spilled_bytes} bytes of files"
                if woken == self._wakes:
                    await first_of(self._freed.changed(), seconds=_LOOK_SECONDS)
            return None
        finally:
            self._queue.remove(turn)
            self.crowded = self.crowded if self._queue else ""
            self._wake()  # Others may share it, and the next one has its turn.

    def _wake(self) -> None:
        self._wakes += 1
        self._freed.wake()

    # On the thread that changes the tables.

    def _close_spilled(self) -> None:
        for release in self._spilled_releases():
            release.serves = range(0)

    def _freeze(
        self, after: int, repair: Repair, afters: Sequence[int] | None, freed: Callable[[], None]
    ) -> FrozenRelease | None:
        """A release for a replica at `after`; None while there is no room for it.

        `afters` are the numbers of all that wait, where it is its turn to take room in a file, else None.
        """
        tables, head = self._state()
        room, about = self._room(), size_after(tables, after, repair)
        if about > room:
            if not repair.slots and (shared := self._shared(tables, after, head, about)):
                return shared
            if afters is None:
                return None
        lack = Lack.of(tables, after, repair)
        if lack.nbytes <= room:
            return self._noted(freeze(lack, head))
        return self._spill(tables, lack, head, afters or [after], freed)

    def _shared(
        self, tables: Sequence[StampedTable], after: int, head: Head | None, about: int
    ) -> FrozenRelease | None:
        """What others are sent already, where that and what comes after it is not much more than is lacking."""

        def cost(release: FrozenRelease) -> int:
            later = release.head is not None and release.head.number
            return release.nbytes + (size_after(tables, later) if head and later < head.number else 0)

        specs = [table.spec for table in tables]
        found = [each for each in self._spilled_releases() if after in each.serves and each.specs == specs]
        cheapest = min(found, key=cost, default=None)
        return cheapest if cheapest and cost(cheapest) <= SHARED_FACTOR * about else None

    def _spill(
        self,
        tables: Sequence[StampedTable],
        lack: Lack,
        head: Head | None,
        afters: Sequence[int],
        freed: Callable[[], None],
    ) -> FrozenRelease | None:
        """A release in a file, with rows that others who wait lack, if there is room for it."""
        for each in self._with_others(tables, lack, afters):
            if self._spilled.total and self._spilled.total + each.nbytes > SPILLED_TABLES * size_of(tables):
                continue
            with contextlib.suppress(*([DamagedRows] if each is not lack else [])):
                release = freeze(each, head, self._scratch, partial(self._free, freed))
                self._spilled.add(each.nbytes)
                return self._noted(release)
        self._want_back()
        return None

    def _with_others(self, tables: Sequence[StampedTable], lack: Lack, afters: Sequence[int]) -> Sequence[Lack]:
        """What to try: a lack with the rows that others lack too, and the lack alone."""
        most = SHARED_FACTOR * lack.nbytes
        earlier = sorted(each for each in {*afters} if 0 < each < lack.after and size_after(tables, each) <= most)
        if lack.repair.slots or not earlier:
            return [lack]
        return [Lack.of(tables, earlier[0]), lack]

    def _free(self, freed: Callable[[], None], size: int) -> None:
        self._spilled.free(size)
        freed()

    def _want_back(self) -> None:
        for release in self._spilled_releases():
            release.wanted_back |= time.monotonic() > release.made + LONGEST_SENT_SECONDS

    def prepared(self, rows: Sequence[tuple[int, RowBatch]]) -> FrozenRelease | None:
        """What a replica will lack that is at the number that the tables are at, before these get the rows of the
        next one, by slot: to be `completed` then. None if there is no memory for it.
        """
        size = sum(batch.nbytes for _, batch in rows)
        if size > self._room():
            return None
        chunks = [Chunk.written(slot, piece) for slot, batch in rows for piece in chunked(batch)]
        return self._noted(FrozenRelease(None, chunks, memory_bytes=size))

    def completed(self, release: FrozenRelease) -> FrozenRelease:
        """What was `prepared`, now that the tables have these rows."""
        tables, release.head = self._state()
        release.checksums = checksums_of(tables)
        release.whole = replacing(tables, release.head.number - 1) if release.head else release.whole
        return release

    def _room(self) -> int:
        """How much memory a release may take now, bytes."""
        return RELEASES_IN_MEMORY_BYTES - sum(release.memory_bytes for release in self._live())

    def _live(self) -> list[FrozenRelease]:
        """The releases that somebody uses."""
        live = [release for each in self._frozen if (release := each())]
        self._frozen = [ref(release) for release in live]
        return live

    def _spilled_releases(self) -> list[FrozenRelease]:
        return [release for release in self._live() if release.spilled_bytes]

    def _noted(self, release: FrozenRelease) -> FrozenRelease:
        self._frozen.append(ref(release))
        return release


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # The loop has ended: nobody waits in it.
        loop.call_soon_threadsafe(function)


def _failed(found: asyncio.Future[FrozenRelease]) -> bool:
    return found.done() and (found.cancelled() or found.exception() is not None)
