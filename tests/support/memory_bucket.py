"""A bucket in memory, with a separate network for each process, and logs that only owners append to."""

from collections.abc import Callable

from deltasync.base.errors import ServiceUnavailable
from deltasync.cluster.bucket import Changed, Entry


class MemoryStore:
    """The brokers' data, which a test may lose or reset to an earlier copy."""

    def __init__(self) -> None:
        self.entries = dict[str, Entry]()
        self.sequence = 0
        self.made = 1  # Grows with each bucket of that name.
        self.networks = list["MemoryBucket"]()

    def copy(self) -> tuple[dict[str, Entry], int]:
        return dict(self.entries), self.sequence

    def put_back(self, copy: tuple[dict[str, Entry], int]) -> None:
        self.entries, self.sequence, self.made = dict(copy[0]), copy[1], self.made + 1

    def lose(self) -> None:
        self.put_back(({}, 0))


class MemoryBucket:
    """The bucket as one process sees it; implements `Bucket`."""

    def __init__(self, store: MemoryStore) -> None:
        self.cut = self.refuses = False
        self._store = store
        self._seen: Callable[[Entry], None] | None = None
        self._made = 0
        store.networks.append(self)

    async def put(self, key: str, value: bytes, revision: int) -> int:
        self._reach()
        held = self._store.entries.get(key)
        if self.refuses or (held.revision if held else 0) != revision:
            raise Changed(key)
        self._store.sequence += 1
        entry = self._store.entries[key] = Entry(key, value, self._store.sequence)
        for each in self._store.networks:
            each.tell(entry)
        return entry.revision

    async def follow(self, seen: Callable[[Entry], None]) -> None:
        self._reach()
        self._seen, self._made = seen, self._store.made
        for entry in sorted(self._store.entries.values(), key=lambda each: each.revision):
            seen(entry)

    async def close(self) -> None:
        self._seen = None

    def tell(self, entry: Entry) -> None:
        """Deliver a change, unless one was lost before.

        A change is lost if the network is cut or the bucket was recreated, and then so are all later changes.
        Nothing reports that.
        """
        if self.cut or self._made != self._store.made:
            self._seen = None
        if self._seen:
            self._seen(entry)

    def _reach(self) -> None:
        if self.cut:
            raise ServiceUnavailable("brokers do not answer")


class MemoryLog:
    """A model's stream; appending needs its last sequence number."""

    def __init__(self) -> None:
        self.records = list[tuple[str, str]]()  # Who, and what: a fence or a cut.

    def append(self, who: str, what: str, expected: int) -> bool:
        if len(self.records) != expected:
            return False
        self.records.append((who, what))
        return True
