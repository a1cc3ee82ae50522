"""Reads a file of ratings, and says what to do with a file of another kind."""

import csv
import gzip
import io
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from deltasync.base.errors import InvalidInput
from deltasync.base.words import counted

_COLUMNS = ("user", "item", "rating", "timestamp")
# Names of the columns in headers, in lower case and only letters.
_NAMES = {
    "user": ("user", "userid", "reviewerid"),
    "item": ("item", "itemid", "movieid", "productid", "asin", "parentasin"),
    "rating": ("rating", "overall"),
    "timestamp": ("timestamp", "time", "unixtimestamp", "unixreviewtime"),
}
_SEPARATORS = ("::", "\t", ",")
_GZIP = b"\x1f\x8b"
_CSV_REMEDY = "write user, item, rating and timestamp as CSV, for example with pandas"
# For files of other kinds: the first bytes, the kind, and what to do.
_KINDS = (
    (_GZIP, "gzip in gzip", "unpack it once with gunzip"),
    (b"PK\x03\x04", "a zip archive", "unpack it with unzip, and name the file of ratings that is in it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it with unzstd"),
    (b"BZh", "compressed with bzip2", "unpack it with bunzip2"),
    (b"\xfd7zXZ", "compressed with xz", "unpack it with unxz"),
    (b"\x04\x22\x4d\x18", "compressed with lz4", "unpack it with unlz4"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it with 7z x, and name the file of ratings that is in it"),
    (b"PAR1", "a Parquet file", _CSV_REMEDY),
    (b"ARROW1", "an Arrow file", _CSV_REMEDY),
    (b"\x89HDF", "an HDF5 file", _CSV_REMEDY),
    (b"\x93NUMPY", "a NumPy array", _CSV_REMEDY),
    (b"SQLite format 3", "an SQLite database", _CSV_REMEDY),
    (b"{", "JSON", _CSV_REMEDY),
    (b"[", "JSON", _CSV_REMEDY),
    (b"<", "HTML or XML", "download the file of ratings again: this may be a web page instead"),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "convert it: iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    (b"\x00\x00\xfe\xff", "text in UTF-32", "convert it: iconv -f UTF-32 -t UTF-8 FILE > NEW"),
    (b"\xff\xfe", "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
    (b"\xfe\xff", "text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
)
_SHOWN = 60  # Maximum characters of a line or a value in an error.
_TAR_MARK, _TAR_AT = b"ustar", 257
_ID = re.compile(r"\s*[0-9]{1,19}\s*")
_LARGEST_ID = 2**63 - 1
# Larger numbers are milliseconds since 1970: as seconds they would be after the year 5138.
_MOST_SECONDS = 10**11


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings in the order of their file.

    Attributes:
        users: raw user ids, from 0.
        items: raw item ids, from 0.
        ratings: finite numbers.
        timestamps: Unix seconds.
    """

    users: "array[int]" = field(default_factory=lambda: array("q"))
    items: "array[int]" = field(default_factory=lambda: array("q"))
    ratings: "array[float]" = field(default_factory=lambda: array("d"))
    timestamps: "array[int]" = field(default_factory=lambda: array("q"))


def ratings_of(path: Path) -> Ratings:
    """Read a file with one rating per line, as text or compressed with gzip.

    The separator is `::`, a tab or a comma. A header may name the columns in any order; without a header they are
    user, item, rating and timestamp.

    Raises:
        InvalidInput: the file cannot be read, is of another kind, which the message names, or has an invalid line,
            in which case the message names the line and the value.
    """
    text = _text_of(path)
    separator = next((each for each in _SEPARATORS if each in text.partition("\n")[0]), "::")
    expected = f"expected {separator.join(_COLUMNS)!r} in numbers"
    found, columns = Ratings(), _Columns(0, 1, 2, 3, of=4)
    for number, fields in _lines(path, text, separator):
        try:
            if number == 1 and not any(map(_is_number, fields)):
                columns = _columns_of(fields)
                continue
            if len(fields) != columns.of:
                shown = separator.join(fields)[:_SHOWN]
                raise ValueError(f"{shown!r} has {counted(len(fields), 'field')}, expected {columns.of}")
            found.users.append(_id("user", fields[columns.user]))
            found.items.append(_id("item", fields[columns.item]))
            found.ratings.append(_rating(fields[columns.rating]))
            found.timestamps.append(_seconds(fields[columns.timestamp]))
        except ValueError as error:
            raise InvalidInput(f"{path}, line {number}: {error}; {expected}") from None
    if not found.users:
        raise InvalidInput(f"{path}: holds no ratings; {expected} on each line")
    return found


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror}); name a file of ratings") from error
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInput(f"{path}: damaged gzip data ({error}); copy or download it again") from error
    for begin, what, remedy in _KINDS:
        if content.startswith(begin):
            raise InvalidInput(f"{path}: {what}, not a file of ratings; {remedy}")
    if content[_TAR_AT:].startswith(_TAR_MARK):
        raise InvalidInput(f"{path}: a tar archive, not a file of ratings; unpack it with tar -xf")
    if b"\0" in content:
        raise InvalidInput(f"{path}: binary data or text in UTF-16, not a file of ratings; {_CSV_REMEDY}")
    # Only columns that are not read can have characters other than ASCII, so replacing these does not matter.
    return content.decode("utf-8-sig", errors="replace").rstrip(" \r\n")


def _lines(path: Path, text: str, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line, from 1, and its fields without their quotes."""
    lines = io.StringIO(text, newline=None)
    if len(separator) > 1:
        yield from ((number, line.rstrip("\n").split(separator)) for number, line in enumerate(lines, 1))
        return
    reader = csv.reader(lines, delimiter=separator)
    try:
        yield from ((reader.line_num, fields) for fields in reader)
    except csv.Error as error:
        raise InvalidInput(f"{path}, line {reader.line_num}: {error}; close the quote that is open") from error


class _Columns(NamedTuple):
    """Positions of the columns in a line, and its number of fields."""

    user: int
    item: int
    rating: int
    timestamp: int
    of: int


def _columns_of(header: list[str]) -> _Columns:
    """Find the columns in a header.

    Raises:
        ValueError: a column is missing.
    """
    # recbole adds the type to a name: `user_id:token`.
    names = [re.sub("[^a-z]", "", name.partition(":")[0].lower()) for name in header]
    places = {column: place for place, name in enumerate(names) for column in _COLUMNS if name in _NAMES[column]}
    if missing := [column for column in _COLUMNS if column not in places]:
        known = ", ".join(_NAMES[missing[0]])
        raise ValueError(f"{', '.join(header)[:_SHOWN]!r} names no {missing[0]}; call that column one of {known}")
    return _Columns(**places, of=len(header))


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _id(column: str, field: str) -> int:
    if not _ID.fullmatch(field) or (number := int(field)) > _LARGEST_ID:
        text = f"{column} {field[:_SHOWN]!r} is not a whole number from 0 to {_LARGEST_ID}"
        raise ValueError(f"{text}: number the {column}s first, for example with pandas.factorize")
    return number


def _rating(field: str) -> float:
    if not _is_number(field) or not math.isfinite(rating := float(field)):
        raise ValueError(f"rating {field[:_SHOWN]!r} is not a finite number")
    return rating


def _seconds(field: str) -> int:
    if not _is_number(field) or not (seconds := float(field)).is_integer():
        raise ValueError(f"timestamp {field[:_SHOWN]!r} is not a whole number of seconds since 1970")
    if abs(seconds) > _MOST_SECONDS:
        raise ValueError(f"timestamp {field[:_SHOWN]!r} is not in seconds since 1970: divide milliseconds by 1000")
    return int(seconds)
