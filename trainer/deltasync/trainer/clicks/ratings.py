"""Events from a file of movie ratings, as MovieLens has had them: apart by `::`, by tabs or by commas."""

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
_HEADER = [b"userId", b"movieId", b"rating", b"timestamp"]
_SEPARATORS = (b"::", b"\t", b",")
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

    A file holds lines `user::item::rating::timestamp`, or the same with tabs or commas instead of colons. The
    first line may be the header `userId,movieId,rating,timestamp`, and the last ones may be blank.
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
        raise DataError(f"{path}: holds no ratings; expected lines like {_example(None)}")
    return columns


def _parse(path: Path, file: BinaryIO) -> _Columns:
    """Return the columns of the file, whose first line shows its format."""
    first = _stripped(file.readline())
    separator = next((one for one in _SEPARATORS if one in first), None)
    has_header = first.split(separator or b"::") == _HEADER
    if not has_header:
        file.seek(0)
    columns = _Columns()
    for number, line in _without_blank_end(file, start=2 if has_header else 1):
        try:
            _append(columns, line.split(separator or b"::"))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}; expected {_example(separator)}") from error
    return columns


def _without_blank_end(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
    """Yield lines and their numbers, but not the blank ones that no other line follows."""
    blank: list[tuple[int, bytes]] = []
    for number, line in enumerate(map(_stripped, file), start):
        if line.strip():
            yield from blank[:1]
            blank.clear()
            yield number, line
        elif not blank:  # The first of several is the one to tell of.
            blank.append((number, line))


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


def _stripped(line: bytes) -> bytes:
    return line.rstrip(b"\r\n")


def _example(separator: bytes | None) -> str:
    """What a line is like; without a separator, as the file has none of those known."""
    example = repr((separator or b"::").decode().join(_FIELDS)) + " in numbers"
    return example if separator else f"{example}, or the same with commas or tabs"
