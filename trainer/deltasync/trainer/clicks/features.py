"""Features of events, each made only from the events before it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.trainer.checks import check_whole
from deltasync.trainer.clicks.events import Events
from deltasync.trainer.clicks.hashing import hash_to

HOURS_OF_WEEK = 168
"""Rows of the hour table; hour 0 begins on Monday at 00:00 UTC."""
DENSE_FEATURES = ("user_events", "item_events", "hour_sin", "hour_cos")
"""Columns of the dense features."""
RAW_IDS = 2**62
"""Raw ids of users and items are from 0 up to here, spread evenly."""

_HOUR, _DAY = 3600, 86_400
_MONDAY = 72  # hours from the Monday before the unix epoch, a Thursday


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """Rows of the tables of users, items and user-item crosses, and how many liked items are remembered.

    With `raw_ids`, users and items are named by raw ids, not by rows; the numbers of rows bound the memory still.
    """

    users: int
    items: int
    cross_buckets: int
    history_length: int = 5
    raw_ids: bool = False

    def __post_init__(self) -> None:
        for name in ("users", "items", "cross_buckets", "history_length"):
            check_whole(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The features of n events, in the events' order."""

    index: NDArray[np.int64]
    """[n] position of the events in the stream."""
    label: NDArray[np.float32]
    """[n] the events' labels."""
    dense: NDArray[np.float32]
    """[n, 4] DENSE_FEATURES: log(1 + earlier events) of user and item, sine and cosine of the time of day."""
    ids: dict[str, NDArray[np.int64]]
    """[n] rows of the tables `user`, `item`, `cross` and `hour`, by these names; or raw ids of users and items."""
    history: NDArray[np.int64]
    """[sum of history_lengths] items liked before by the user of each event in turn, oldest first."""
    history_lengths: NDArray[np.int32]
    """[n] entries of `history` that belong to each event, from 0 to the history length."""

    def __len__(self) -> int:
        return self.index.size


class Featurizer:
    """Turns a stream of events into features, remembering what it has seen.

    The features depend on the events' order alone, never on how the stream is cut into calls. Raw ids get the
    rows of a table in the order of their first appearance. Once a table is full, further ids are hashed onto
    its rows and share them with the ids there, counts and history included: the table sizes bound the memory.
    """

    def __init__(self, options: FeatureOptions) -> None:
        self._cross_buckets, self._raw_ids = options.cross_buckets, options.raw_ids
        self._users, self._items = _Vocabulary(options.users), _Vocabulary(options.items)
        self._user_events, self._item_events = _Counts(options.users), _Counts(options.items)
        self._liked = _LikedItems(options.history_length)

    def features(self, events: Events) -> Features:
        """Return the features of the stream's next events and remember these events."""
        user, item = self._users.rows(events.user), self._items.rows(events.item)
        user_id = hash_to(RAW_IDS, events.user) if self._raw_ids else user
        item_id = hash_to(RAW_IDS, events.item) if self._raw_ids else item
        history, lengths = self._liked.before(user, item_id, events.label)
        return Features(
            index=events.index,
            label=events.label,
            dense=self._dense(user, item, events.timestamp),
            ids={
                "user": user_id,
                "item": item_id,
                "cross": hash_to(self._cross_buckets, user, item),
                "hour": (events.timestamp // _HOUR + _MONDAY) % HOURS_OF_WEEK,
            },
            history=history,
            history_lengths=lengths,
        )

    def _dense(
        self, user: NDArray[np.int64], item: NDArray[np.int64], timestamp: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        angle = (timestamp % _DAY) * (2 * np.pi / _DAY)
        dense = np.empty((user.size, len(DENSE_FEATURES)), dtype=np.float32)
        dense[:, 0] = np.log1p(self._user_events.before(user))
        dense[:, 1] = np.log1p(self._item_events.before(item))
        dense[:, 2], dense[:, 3] = np.sin(angle), np.cos(angle)
        return dense


class _Vocabulary:
    """Rows of a table, given to raw ids in the order of their first appearance."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: dict[int, int] = {}

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the raw `ids`, [n], giving free rows to new ones."""
        rows = np.fromiter(self._known_or_new(ids.tolist()), dtype=np.int64, count=ids.size)
        homeless = rows < 0
        if homeless.any():
            rows[homeless] = hash_to(self._size, ids[homeless])
        return rows

    def _known_or_new(self, ids: list[int]) -> Iterator[int]:
        """Yield each id's row, or -1 where it has none and none is free."""
        rows = self._rows
        for raw in ids:
            row = rows.get(raw, -1)
            if row < 0 and len(rows) < self._size:
                row = rows[raw] = len(rows)
            yield row


class _Counts:
    """How many events each row has had."""

    def __init__(self, size: int) -> None:
        self._counts = np.zeros(size, dtype=np.int64)

    def before(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many events came before each on its row, [n]; then count them all. `rows` is [n]."""
        order = np.argsort(rows, kind="stable")
        grouped = rows[order]
        starts = np.flatnonzero(np.diff(grouped, prepend=-1))
        sizes = np.diff(starts, append=rows.size)
        earlier = np.empty_like(rows)
        earlier[order] = np.arange(rows.size) - np.repeat(starts, sizes)
        earlier += self._counts[rows]
        self._counts[grouped[starts]] += sizes
        return earlier


class _LikedItems:
    """The items each user row liked last, oldest first."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._liked: dict[int, tuple[int, ...]] = {}

    def before(
        self, users: NDArray[np.int64], items: NDArray[np.int64], labels: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the items liked before each event, flat, and their numbers, [n]; then note the events."""
        values: list[int] = []
        lengths: list[int] = []
        for user, item, label in zip(users.tolist(), items.tolist(), labels.tolist(), strict=True):
            past = self._liked.get(user, ())
            values.extend(past)
            lengths.append(len(past))
            if label == 1:
                self._liked[user] = (*past, item)[-self._length :]
        return np.array(values, dtype=np.int64), np.array(lengths, dtype=np.int32)
