"""3. Computes the features of each event, only from earlier events."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.trainer.example.options import HOURS_OF_WEEK, RAW_IDS, ModelOptions
from deltasync.trainer.example.stream import Events

SPARSE_FEATURES = ("user", "item", "cross", "hour", "history")
"""All except `history` have one id per event."""
DENSE_FEATURES = ("user_events", "item_events", "hour_sin", "hour_cos")

_HISTORY = 5
_HOUR, _DAY = 3600, 86_400
_MONDAY = 72  # Hours from the Monday before the unix epoch, a Thursday.


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """The features of n events."""

    index: NDArray[np.int64]
    """[n] positions of the events in the stream."""
    label: NDArray[np.float32]
    """[n]"""
    dense: NDArray[np.float32]
    """[n, 4] DENSE_FEATURES: log(1 + earlier events) of user and item, sine and cosine of the time of day."""
    ids: dict[str, NDArray[np.int64]]
    """[n] ids of `user`, `item`, `cross` and `hour`: rows of these tables, or raw ids of users and items."""
    history: NDArray[np.int64]
    """[sum of history_lengths] the last items that each event's user liked, oldest first."""
    history_lengths: NDArray[np.int32]
    """[n] entries of `history` that belong to each event."""

    def __len__(self) -> int:
        return self.index.size


class Featurizer:
    """Turns a stream of events into features, with counts and histories of the events so far.

    The features only depend on the order of the events, not on how calls split the stream. Raw ids get rows of a
    table in the order of their first appearance. Once a table is full, further ids share rows by their hash, with
    their counts and histories. The sizes of the tables therefore limit the memory.
    """

    def __init__(self, model: ModelOptions) -> None:
        self._model = model
        self._user_rows, self._item_rows = dict[int, int](), dict[int, int]()
        self._user_events, self._item_events = defaultdict[int, int](int), defaultdict[int, int](int)
        self._liked: dict[int, tuple[int, ...]] = {}

    def features(self, events: Events) -> Features:
        """The features of the next events of the stream."""
        user = self._rows_of(self._user_rows, events["user"], self._model.users)
        item = self._rows_of(self._item_rows, events["item"], self._model.items)
        user_id = hash_to(RAW_IDS, events["user"]) if self._model.managed else user
        item_id = hash_to(RAW_IDS, events["item"]) if self._model.managed else item
        counts, history, lengths = np.empty((len(events), 2)), list[int](), list[int]()
        lines = zip(user.tolist(), item.tolist(), item_id.tolist(), events["label"].tolist(), strict=True)
        for number, (user_row, item_row, named, label) in enumerate(lines):
            counts[number] = self._user_events[user_row], self._item_events[item_row]
            past = self._liked.get(user_row, ())
            history += past
            lengths.append(len(past))
            # Update the counts last, because an event must not be in its own features.
            self._user_events[user_row] += 1
            self._item_events[item_row] += 1
            if label == 1:
                self._liked[user_row] = (*past, named)[-_HISTORY:]
        angle = (events["timestamp"] % _DAY) * (2 * np.pi / _DAY)
        hour = (events["timestamp"] // _HOUR + _MONDAY) % HOURS_OF_WEEK
        cross = hash_to(self._model.cross_buckets, user, item)
        return Features(
            index=np.ascontiguousarray(events["index"]),
            label=np.ascontiguousarray(events["label"]),
            dense=np.column_stack([np.log1p(counts), np.sin(angle), np.cos(angle)]).astype(np.float32),
            ids={"user": user_id, "item": item_id, "cross": cross, "hour": hour},
            history=np.array(history, np.int64),
            history_lengths=np.array(lengths, np.int32),
        )

    @staticmethod
    def _rows_of(row_of: dict[int, int], raw: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        rows = hash_to(size, raw)
        for number, name in enumerate(raw.tolist()):
            if len(row_of) < size:
                row_of.setdefault(name, len(row_of))
            rows[number] = row_of.get(name, rows[number])
        return rows


def hash_to(buckets: int, *columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Hash each row of the columns to a bucket from 0 to buckets - 1, equally on all machines (SplitMix64)."""
    mixed = np.zeros(columns[0].shape, np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(buckets)).astype(np.int64)
