"""Events from a file of movie ratings: MovieLens-1M (`::`) or MovieLens csv."""

import math
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from deltasync.trainer.clicks.events import DataError, Events

_BLOCK = 8192
_LARGEST = 2**63 - 1
_FIELDS = ("user", "item", "rating", "timestamp")
_CSV_HEADER = b"userId,movieId,rating,timestamp"
_WHOLE = re.compile(rb"[0-9]{1,19}")
_DECIMAL = re.compile(rb"-?[0-9]{1,19}(?:\.[0-9]+)?")


@dataclass(frozen=True)
class _Columns:
    """The ratings in file order."""

    user: "array[int]" = field(default_factory=lambda: array("q"))
    item: "array[int]" = field(default_factory=lambda: array("q"))
    rating: "array[float]" = field(default_factory=lambda: array("d"))
    timestamp: "array[int]" = field(default_factory=lambda: array("q"))


def rating_events(path: Path | str, like_from: float | None = None) -> Iterator[Events]:
    """Read all ratings of a file now and return them as events in time order, equal times in file order.

    A file holds lines `user::item::rating::timestamp` or csv with header `userId,movieId,rating,timestamp`.
    A rating of at least `like_from` has label 1; by default 8 if the largest rating is above 5, else 4.
    The whole file is held in arrays: about 80 bytes a rating while it is read, 36 bytes afterwards.
    Raises DataError for a file that cannot be read, holds no rating, or has a line that is not a rating.
    """
    if like_from is not None and not math.isfinite(like_from):
        raise ValueError(f"like_from must be a finite rating, not {like_from}")
    columns = _read(Path(path))
    rating = np.frombuffer(columns.rating, dtype=np.float64)
    if like_from is None:
        like_from = 8.0 if rating.max() > 5 else 4.0
    return _blocks(_in_time_order(columns, rating >= like_from))


def _in_time_order(columns: _Columns, liked: NDArray[np.bool_]) -> Events:
    timestamp = np.frombuffer(columns.timestamp, dtype=np.int64)
    order = np.argsort(timestamp, kind="stable")
    return Events(
        index=np.arange(order.size, dtype=np.int64),
        user=np.frombuffer(columns.user, dtype=np.int64)[order],
        item=np.frombuffer(columns.item, dtype=np.int64)[order],
        timestamp=timestamp[order],
        label=liked[order].astype(np.float32),
    )


def _blocks(events: Events) -> Iterator[Events]:
    return (events.take(slice(start, start + _BLOCK)) for start in range(0, len(events), _BLOCK))


def _read(path: Path) -> _Columns:
    try:
        with path.open("rb") as file:
            columns = _parse(path, file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); name a ratings file") from error
    if not columns.rating:
        raise DataError(f"{path}: holds no ratings; expected lines like {_example(b'::')!r}")
    return columns


def _parse(path: Path, file: BinaryIO) -> _Columns:
    """Return the columns of the file, whose first line shows its format."""
    is_csv = file.readline().rstrip(b"\r\n") == _CSV_HEADER
    separator, first = (b",", 2) if is_csv else (b"::", 1)
    if not is_csv:
        file.seek(0)
    columns = _Columns()
    for number, line in enumerate(file, start=first):
        try:
            _append(columns, line.rstrip(b"\r\n").split(separator))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; expected {_example(separator)!r}") from error
    return columns


def _append(columns: _Columns, texts: list[bytes]) -> None:
    if len(texts) != len(_FIELDS):
        raise ValueError(f"found {len(texts)} field(s), the first being {_shown(texts[0])}")
    user, item, rating, timestamp = texts
    columns.user.append(_whole("user", user))
    columns.item.append(_whole("item", item))
    if not _DECIMAL.fullmatch(rating):
        raise ValueError(f"found rating {_shown(rating)}, which is not a number")
    columns.rating.append(float(rating))
    columns.timestamp.append(_whole("timestamp", timestamp))


def _whole(name: str, text: bytes) -> int:
    if not _WHOLE.fullmatch(text) or (value := int(text)) > _LARGEST:
        raise ValueError(f"found {name} {_shown(text)}, which is not a whole number from 0 to 2**63 - 1")
    return value


def _shown(text: bytes) -> str:
    return repr(text[:40].decode("utf-8", "backslashreplace"))


def _example(separator: bytes) -> str:
    return separator.decode().join(_FIELDS)
