"""The manifest of a checkpoint, written last, so that a checkpoint exists completely or not at all.

MODEL/manifests/ID.json     names all files of the checkpoint; its first line has a checksum of the rest
MODEL/data/ID-NUMBER        rows or log records, see `chunks`

Checkpoints share files: each names the files of its base and of later releases, and adds one layer. Files with
dirty rows are not shared. An id begins with a number that is larger than in all earlier checkpoints.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import xxhash

from deltasync.checkpoints.chunks import CheckpointDamaged, LaterFormat

FORMAT = 1
MANIFESTS, DATA = "manifests", "data"
_ID = "[0-9]{20}-[0-9a-f]{8}"
# Names of the files above, and of files that a process was writing when it ended.
_NAME = re.compile(rf"({_ID})(?:\.json|-[0-9]{{6}})(?:\.unfinished)?")
_FIRST_LINE = re.compile(rb"deltasync checkpoint ([0-9]{1,9}) ([0-9a-f]{32})")
_FIRST_LINE_BYTES = 80


@dataclass(frozen=True)
class TableKey:
    """The identity of a table.

    Attributes:
        owner: empty for a table of the model, otherwise the consumer whose view has it.
        name: the table's name.
        born: version or release at which it replaced an earlier table of that name.
    """

    owner: str
    name: str
    born: int


@dataclass(frozen=True)
class TableEntry:
    """A table in a checkpoint.

    Attributes:
        key: the table.
        slot: its number in the chunks of all layers.
        record: the data from which its owner recreates it.
        number: its newest stamp.
        checksum: the checksum of all its rows.
    """

    key: TableKey
    slot: int
    record: Mapping[str, Any]
    number: int
    checksum: int


@dataclass(frozen=True)
class File:
    """A file, and its size."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Layer:
    """Rows changed since the previous layer, as they are at `version`, and the log records of that time.

    All rows of a table are included if the previous checkpoint lacks the table.

    Attributes:
        rounds: files with rows. Within a round, files have different rows; across rounds, the last one counts.
        records: files with log records.
    """

    version: int
    rounds: Sequence[Sequence[File]]
    records: Sequence[File]

    @property
    def files(self) -> list[File]:
        """All files."""
        return [*(file for files in self.rounds for file in files), *self.records]

    @property
    def bytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        model: the model's name.
        histories: the ids of the histories to which the owners' numbers belong, by owner.
        version: the version of the checkpoint.
        seal: the checksum of that version's seal.
        id: the checkpoint's id.
        made_unix_ns: when it was completed, nanoseconds since 1970.
        tables: the tables of the model and its views.
        states: the other data that owners need to continue, by owner.
        layers: the base, then later releases.
        dirty: files with the dirty rows of views.
        slots: number of slots that its layers use; see `TableEntry`.
        small: small records of the log.
    """

    model: str
    histories: Mapping[str, str]
    version: int
    seal: int
    id: str
    made_unix_ns: int
    tables: Sequence[TableEntry]
    states: Mapping[str, Mapping[str, Any]]
    layers: Sequence[Layer]
    dirty: Sequence[File]
    slots: int
    small: Mapping[str, bytes]

    @property
    def history(self) -> str:
        """The id of the model's history."""
        return self.histories[""]

    @property
    def name(self) -> str:
        """The name of the manifest file."""
        return manifest_name(self.model, self.id)

    @property
    def rounds(self) -> list[Sequence[File]]:
        """The files with rows in all layers."""
        return [files for layer in self.layers for files in layer.rounds]

    @property
    def files(self) -> list[File]:
        """All files except the manifest."""
        return [*(file for layer in self.layers for file in layer.files), *self.dirty]

    @property
    def bytes(self) -> int:
        """Size of these files in bytes."""
        return sum(file.bytes for file in self.files)

    @property
    def new_bytes(self) -> int:
        """Size of the files that the previous checkpoint does not have, in bytes."""
        return self.layers[-1].bytes + sum(file.bytes for file in self.dirty)


def manifest_name(model: str, id: str) -> str:  # noqa: A002
    """The name of a checkpoint's manifest file."""
    return f"{model}/{MANIFESTS}/{id}.json"


def pack_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest."""
    content = asdict(manifest) | {
        "small": {name: value.decode("latin-1") for name, value in manifest.small.items()}
    }
    return pack_checked(content)


def pack_checked(content: Mapping[str, Any]) -> bytes:
    """Encode the content of a JSON file after a line with its format and checksum."""
    body = json.dumps(content).encode()
    return f"deltasync checkpoint {FORMAT} {_checksum(FORMAT, body)}\n".encode() + body


def unpack_manifest(name: str, stored: bytes) -> Manifest:
    """Decode the manifest in file `name`."""
    content = unpack_checked(name, stored)
    tables = [TableEntry(**{**each, "key": TableKey(**each["key"])}) for each in content["tables"]]
    layers = [
        Layer(**{**each, "rounds": [_files(some) for some in each["rounds"]], "records": _files(each["records"])})
        for each in content["layers"]
    ]
    small = {key: value.encode("latin-1") for key, value in content["small"].items()}
    dirty = _files(content["dirty"])
    manifest = Manifest(**{**content, "tables": tables, "layers": layers, "dirty": dirty, "small": small})
    if manifest.name != name:
        raise CheckpointDamaged(f"checkpoint {name} has the manifest of {manifest.name}")
    return manifest


def unpack_checked(name: str, stored: bytes) -> dict[str, Any]:
    """Decode the content of JSON file `name`. Raises the errors of `unpack_manifest`."""
    first, _, body = stored.partition(b"\n")
    match = _FIRST_LINE.fullmatch(first)
    if not match or _checksum(int(match[1]), body) != match[2].decode():
        raise CheckpointDamaged(f"checkpoint {name} is damaged: its content does not match its checksum")
    if int(match[1]) != FORMAT:
        text = f"checkpoint {name} has format {int(match[1])}, this version reads {FORMAT}"
        raise LaterFormat(f"{text}: update deltasync")
    content: dict[str, Any] = json.loads(body)
    return content


def check_first_line(name: str, file: BinaryIO, size: int) -> None:
    """Check the format of an open JSON file by its first line. Raises the errors of `unpack_manifest`.

    Only a file of another format is read as a whole.
    """
    match = _FIRST_LINE.match(first := file.read(min(size, _FIRST_LINE_BYTES)))
    if match and int(match[1]) != FORMAT:
        unpack_checked(name, first + file.read())


def id_of(name: str) -> str:
    """The id in the name of a checkpoint's file; empty if it is another file."""
    match = _NAME.fullmatch(name.rpartition("/")[2])
    return match[1] if match else ""


def _checksum(version: int, body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body, version)


def _files(found: Sequence[dict[str, Any]]) -> list[File]:
    return [File(**each) for each in found]
