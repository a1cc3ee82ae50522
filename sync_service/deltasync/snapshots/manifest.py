"""What a snapshot has, and where: written last, so that a snapshot is there whole or not at all.

MODEL/manifests/VERSION-ID.json   names all that belongs to the snapshot, and has a checksum of its own
MODEL/data/ID-NUMBER              blocks of tables, and pieces of the log, one after the other
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from deltasync.core.errors import StorageFailed

FORMAT = 1
MANIFESTS, DATA = "manifests", "data"


class SnapshotDamaged(StorageFailed):
    """Something of a snapshot is missing, or is not what was stored: another try finds the same."""


@dataclass(frozen=True)
class Piece:
    """Bytes of an object, and their checksum."""

    object: str
    start: int
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class SnapshotTable:
    """A table of a model, or of a view, as of the first version of the snapshot, or later.

    Attributes:
        record: what is written down of it.
        rows: how many rows it has.
        block_rows: how many of them are in a block; fewer in the last.
        arrays: type and shape of a row of each array, in their order in a block.
        blocks: where these are.
    """

    record: Mapping[str, Any]
    rows: int
    block_rows: int
    arrays: Sequence[tuple[str, Sequence[int]]]
    blocks: Sequence[Piece]


@dataclass(frozen=True, kw_only=True)
class SnapshotView:
    """A consumer's view, as of release `first`, or later: its record, the head at that release, and its tables."""

    record: Mapping[str, Any]
    first: int
    head: Mapping[str, Any]
    tables: Sequence[SnapshotTable]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a snapshot has.

    Attributes:
        model: of which.
        history: the id of its history.
        first: the version that the tables are of, or later; the log's records after it bring them to `version`.
        head: what is written down of the head at that version.
        version: the one that the snapshot is of.
        seal: the checksum of that version's seal.
        made_unix_ns: when it was complete.
        id: of the snapshot.
        tables: those of the model.
        consumers: the names of those that follow it.
        views: those of its consumers that have one, by name.
        records: the log's, after `first`: in groups, each a piece.
        seals: those of the log, in groups.
        small: its small records: a piece.
    """

    model: str
    history: str
    first: int
    head: Mapping[str, Any]
    version: int
    seal: int
    made_unix_ns: int
    id: str
    tables: Sequence[SnapshotTable]
    consumers: Sequence[str] = ()
    views: Mapping[str, SnapshotView] = field(default_factory=dict)
    records: Sequence[Piece] = ()
    seals: Sequence[Piece] = ()
    small: Piece = Piece("", 0, 0, "")

    @property
    def name(self) -> str:
        """The object that has it."""
        return f"{self.model}/{MANIFESTS}/{self.version:020d}-{self.id}.json"

    @property
    def pieces(self) -> list[Piece]:
        """All that it names."""
        tables = [*self.tables, *(table for view in self.views.values() for table in view.tables)]
        return [*(each for table in tables for each in table.blocks), *self.records, *self.seals, self.small]

    @property
    def bytes(self) -> int:
        """Bytes of all that."""
        return sum(each.bytes for each in self.pieces)

    def new_bytes(self) -> int:
        """Bytes of what no snapshot before it had."""
        return sum(each.bytes for each in self.pieces if f"/{DATA}/{self.id}-" in each.object)


def pack_manifest(manifest: Manifest) -> bytes:
    """A manifest as it is stored."""
    content = asdict(manifest)
    return json.dumps({"format": FORMAT, "checksum": _checksum(content), "content": content}).encode()


def unpack_manifest(name: str, stored: bytes) -> Manifest:
    """The manifest that was stored as the object `name`.

    Raises:
        SnapshotDamaged: it is.
        StorageFailed: it is of a later version.
    """
    try:
        found = json.loads(stored)
        if found["format"] > FORMAT:
            text = f"snapshot {name} is of format {found['format']}, this version reads {FORMAT}: update deltasync"
            raise StorageFailed(text)
        if found["checksum"] != _checksum(found["content"]):
            raise ValueError("it has another checksum than is written there")
        return _manifest(found["content"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SnapshotDamaged(f"snapshot {name} is damaged ({error!r})") from error


def checksum_of(content: bytes | memoryview) -> str:
    """The checksum of a piece."""
    return xxhash.xxh3_128_hexdigest(content)


def _checksum(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _manifest(content: dict[str, Any]) -> Manifest:
    views = {
        name: SnapshotView(**{**each, "tables": _tables(each["tables"])})
        for name, each in content["views"].items()
    }
    rest = {name: _pieces(content[name]) for name in ("records", "seals")}
    tables, small = _tables(content["tables"]), Piece(**content["small"])
    return Manifest(**{**content, **rest, "tables": tables, "views": views, "small": small})


def _tables(found: Sequence[dict[str, Any]]) -> list[SnapshotTable]:
    return [SnapshotTable(**{**each, "blocks": _pieces(each["blocks"])}) for each in found]


def _pieces(found: Sequence[dict[str, Any]]) -> list[Piece]:
    return [Piece(**each) for each in found]
