"""The manifest of a checkpoint: written last, so that a checkpoint exists whole or not at all.

MODEL/manifests/ID.json     names all files of the checkpoint; its first line has a checksum of the rest
MODEL/data/ID-NUMBER        rows, or records of the log, see `chunks`

Checkpoints share files: each names those of its base and of the releases since, and has added one layer. Files
with dirty rows are its own. An id
begins with a number that is larger than in all checkpoints before it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.chunks import CheckpointDamaged

FORMAT = 1
MANIFESTS, DATA = "manifests", "data"
_ID = "[0-9]{20}-[0-9a-f]{8}"
# Names of what this module's text lists, and of what a process was writing when it ended.
_NAME = re.compile(rf"({_ID})(?:\.json|-[0-9]{{6}})(?:\.unfinished)?")
_FIRST_LINE = re.compile(rb"deltasync checkpoint ([0-9]{1,9}) ([0-9a-f]{32})")


@dataclass(frozen=True)
class TableKey:
    """Which table this is.

    Attributes:
        owner: empty for a table of the model, else the consumer whose view has it.
        name: the table's name.
        born: version, or release, before which another table of that name was there.
    """

    owner: str
    name: str
    born: int


@dataclass(frozen=True)
class TableEntry:
    """A table as a checkpoint has it.

    Attributes:
        key: which table.
        slot: its number in the chunks of all layers.
        record: what its owner needs to make it again.
        number: its newest stamp.
        checksum: of all its rows.
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
    """Rows that have changed since the layer before, as they are at `version`, and the log's records of that time.

    Of a table that the checkpoint before lacks, all rows are there.

    Attributes:
        rounds: files with rows. Those of one round have different rows; of a row in several the last one counts.
        records: files with records.
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
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that a checkpoint has.

    Attributes:
        model: the model's name.
        histories: the ids of the histories that owners' numbers are of, by owner.
        version: the version that the checkpoint is of.
        seal: the checksum of that version's seal.
        id: the checkpoint's id.
        made_unix_ns: when it was complete.
        tables: those of the model and of its views.
        states: what else owners of tables must know to go on, by owner.
        layers: the base, then the releases since.
        dirty: files with the dirty rows of views.
        slots: how many numbers of tables its layers use.
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
        """The manifest's own file."""
        return manifest_name(self.model, self.id)

    @property
    def rounds(self) -> list[Sequence[File]]:
        """The files with rows, of all layers."""
        return [files for layer in self.layers for files in layer.rounds]

    @property
    def files(self) -> list[File]:
        """All other files."""
        return [*(file for layer in self.layers for file in layer.files), *self.dirty]

    @property
    def bytes(self) -> int:
        """Bytes of all other files."""
        return sum(file.bytes for file in self.files)

    @property
    def new_bytes(self) -> int:
        """Bytes of the files that the checkpoint before it does not have."""
        return self.layers[-1].bytes + sum(file.bytes for file in self.dirty)


def manifest_name(model: str, id: str) -> str:  # noqa: A002
    """The name of the manifest of a model's checkpoint."""
    return f"{model}/{MANIFESTS}/{id}.json"


def pack_manifest(manifest: Manifest) -> bytes:
    """A manifest as it is stored."""
    content = asdict(manifest) | {
        "small": {name: value.decode("latin-1") for name, value in manifest.small.items()}
    }
    body = json.dumps(content).encode()
    return f"deltasync checkpoint {FORMAT} {_checksum(FORMAT, body)}\n".encode() + body


def unpack_manifest(name: str, stored: bytes) -> Manifest:
    """The manifest that is stored as the file `name`.

    Raises:
        CheckpointDamaged: it is damaged.
        StorageFailed: it is of a later version of deltasync.
    """
    first, _, body = stored.partition(b"\n")
    found = _FIRST_LINE.fullmatch(first)
    if not found or _checksum(int(found[1]), body) != found[2].decode():
        raise CheckpointDamaged(f"checkpoint {name} is damaged: its content does not fit its checksum")
    if int(found[1]) != FORMAT:
        text = f"checkpoint {name} is of format {int(found[1])}, this version reads {FORMAT}"
        raise StorageFailed(f"{text}: update deltasync")
    manifest = _manifest(json.loads(body))
    if manifest.name != name:
        raise CheckpointDamaged(f"checkpoint {name} has the manifest of {manifest.name}")
    return manifest


def id_of(name: str) -> str:
    """The id in the name of a file of a checkpoint; empty if the file is not one."""
    found = _NAME.fullmatch(name.rpartition("/")[2])
    return found[1] if found else ""


def _checksum(version: int, body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body, version)


def _manifest(content: dict[str, Any]) -> Manifest:
    tables = [TableEntry(**{**each, "key": TableKey(**each["key"])}) for each in content["tables"]]
    layers = [
        Layer(**{**each, "rounds": [_files(some) for some in each["rounds"]], "records": _files(each["records"])})
        for each in content["layers"]
    ]
    small = {name: value.encode("latin-1") for name, value in content["small"].items()}
    dirty = _files(content["dirty"])
    return Manifest(**{**content, "tables": tables, "layers": layers, "dirty": dirty, "small": small})


def _files(found: Sequence[dict[str, Any]]) -> list[File]:
    return [File(**each) for each in found]
