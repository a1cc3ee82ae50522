"""Reading checkpoints in several threads."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import BinaryIO, Protocol, TypeVar

import numpy as np

from deltasync.checkpoints.chunks import CheckpointDamaged, Chunk, read_chunks
from deltasync.checkpoints.manifest import File, Manifest
from deltasync.core.errors import InvalidInput
from deltasync.core.progress import Progress
from deltasync.core.stamps import StampedTable

S = TypeVar("S")
T = TypeVar("T")
_THREADS = 4


class Read(Protocol):
    """Reads a file."""

    def __call__(self, file: File, parse: Callable[[str, BinaryIO, int], T]) -> T:
        """What `parse` makes of its path, of the open file and of the size that it must have."""


def in_order(work: Callable[[S], T], items: Iterable[S]) -> Iterator[tuple[S, T]]:
    """Do some work in several threads, a few items ahead: each item and what came of it, in their order."""
    threads = max(2, min(_THREADS, len(os.sched_getaffinity(0))))
    ahead = deque[tuple[S, Future[T]]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="checkpoints") as pool:
        try:
            for each in items:
                ahead.append((each, pool.submit(work, each)))
                if len(ahead) > threads:
                    item, done = ahead.popleft()
                    yield item, done.result()
            for item, done in ahead:
                yield item, done.result()
        finally:
            for _, left in ahead:
                left.cancel()


def load_rows(manifest: Manifest, tables: Sequence[StampedTable | None], read: Read) -> None:
    """Set tables to what a checkpoint has, see `CheckpointStore.load`."""
    pairs = zip(manifest.tables, tables, strict=True)
    wanted = {entry.slot: (entry, table) for entry, table in pairs if table is not None}

    def load(path: str, opened: BinaryIO, size: int) -> None:
        for chunk in read_chunks(path, opened, size):
            if chunk.slot in wanted:
                _load_chunk(path, chunk, wanted[chunk.slot][1])

    total = sum(file.bytes for files in manifest.rounds for file in files)
    what = f"model {manifest.model!r}: loading the checkpoint of version {manifest.version}"
    progress = Progress(what, total, "bytes")
    for files in manifest.rounds:  # Files of one round have different rows: their order does not matter.
        for file, _ in in_order(partial(read, parse=load), files):
            progress.add(file.bytes)
    for (entry, table), _ in in_order(lambda each: each[1].recount(), wanted.values()):
        if (table.checksum, table.counts.newest) != (entry.checksum, entry.number):
            found = f"checksum {table.checksum:016x} and number {table.counts.newest}"
            raise CheckpointDamaged(
                f"{manifest.name}: table {entry.key.name!r} has {found} once it is loaded, "
                f"expected {entry.checksum:016x} and {entry.number}"
            )


def _load_chunk(path: str, chunk: Chunk, table: StampedTable) -> None:
    name, spec, values = table.spec.name, table.spec, chunk.values
    if values is not None:
        if values.shape[1] != spec.dim * spec.dtype.itemsize:
            raise CheckpointDamaged(f"{path} has rows of another width than table {name!r}")
        values = values.view(spec.dtype)
        wrong = np.flatnonzero(table.held_digests(values) != chunk.digests)
        if len(wrong):
            raise CheckpointDamaged(f"{path}: row {chunk.ids[wrong[0]]} of table {name!r} does not fit its digest")
    try:
        table.load(chunk.ids, chunk.stamps, chunk.digests, values)
    except InvalidInput as error:
        raise CheckpointDamaged(f"{path}: {error}") from error
