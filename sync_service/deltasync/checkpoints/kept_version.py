"""Kept versions: checkpoints that stay until somebody releases them.

MODEL/kept/ID.json     keeps the checkpoint with this id, and has what a consumer that follows it needs

The file is written after the checkpoint, so a kept version is complete in the place that lists it. Kept versions
share files with each other and with other checkpoints.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput, NotFound
from deltasync.base.words import listed
from deltasync.checkpoints.manifest import File, pack_checked, unpack_checked
from deltasync.core.seal import Seal, seal_of_record

KEPT = "kept"
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True, kw_only=True)
class KeptVersion:
    """A version of a model whose checkpoint is kept.

    Attributes:
        name: its name; empty if a schedule kept it.
        id: the id of its checkpoint.
        bytes: size of the files of its checkpoint.
        by: name of the person or program that kept it.
        watched_seconds: for how long services had watched the model by then. The difference of two is an age that
            no wall clock changes.
    """

    model: str
    name: str
    id: str
    seal: Seal
    bytes: int
    kept_unix_ns: int
    by: str
    watched_seconds: float = 0.0

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.seal.version

    @property
    def description(self) -> str:
        """The version with its name."""
        return f"version {self.version}" + (f" ({self.name})" if self.name else "")


def kept_file(model: str, id: str) -> str:  # noqa: A002
    """The name of the file that keeps a checkpoint."""
    return f"{model}/{KEPT}/{id}.json"


def pack_kept(kept: KeptVersion) -> bytes:
    """Encode a kept version."""
    return pack_checked(asdict(kept))


def kept_of_record(record: Mapping[str, Any]) -> KeptVersion:
    """The kept version that a record describes."""
    return KeptVersion(**{**record, "seal": seal_of_record(record["seal"])})


def unpack_kept(name: str, stored: bytes) -> KeptVersion:
    """Decode the kept version in file `name`."""
    return kept_of_record(unpack_checked(name, stored))


def check_kept_name(name: str) -> str:
    """Check the name of a kept version."""
    if _NUMBER.fullmatch(name) or name == "live":
        raise InvalidInput(f"name {name!r}: a kept version needs a name that is neither a number nor 'live'")
    return check_name("name", name)


def is_number(reference: str, version: int) -> bool:
    """Whether a reference is the number of a version. Python refuses to parse numbers of thousands of digits."""
    return reference.lstrip("0") == str(version)


def find_kept(versions: Sequence[KeptVersion], model: str, reference: str) -> KeptVersion:
    """The kept version with a name or a number; the latest if several have the number."""
    for each in reversed(versions):
        if each.name == reference or is_number(reference, each.version):
            return each
    names = [each.name or str(each.version) for each in versions]
    raise NotFound(
        f"model {model!r} has no kept version {reference!r}", detail=f"; kept versions: {listed(names) or 'none'}"
    )


class SharedFiles:
    """Which checkpoints use which files. A change costs as much as one checkpoint has files."""

    def __init__(self) -> None:
        self._files = dict[str, list[File]]()  # By the checkpoint's id.
        self._users = dict[str, list[str]]()  # Ids of checkpoints, by the file's name.
        self._own = dict[str, int]()

    def __contains__(self, id: str) -> bool:  # noqa: A002
        return id in self._files

    def uses(self, name: str) -> bool:
        """Whether a checkpoint uses a file."""
        return name in self._users

    def own_bytes(self, id: str) -> int | None:  # noqa: A002
        """Bytes of the files that only this checkpoint uses; None if its files are unknown."""
        return self._own.get(id)

    def set(self, id: str, files: Iterable[File]) -> None:  # noqa: A002
        """Add a checkpoint, or replace its files."""
        self.remove(id)
        self._files[id], self._own[id] = list(files), 0
        for each in self._files[id]:
            users = self._users.setdefault(each.name, [])
            if len(users) == 1:
                self._own[users[0]] -= each.bytes
            users.append(id)
            if len(users) == 1:
                self._own[id] += each.bytes

    def remove(self, id: str) -> None:  # noqa: A002
        """Remove a checkpoint, if it is there."""
        for each in self._files.pop(id, ()):
            users = self._users[each.name]
            users.remove(id)
            if len(users) == 1:
                self._own[users[0]] += each.bytes
            elif not users:
                del self._users[each.name]
        self._own.pop(id, None)
