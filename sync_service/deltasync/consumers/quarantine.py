"""Versions of a model that are sealed and kept from its consumers, until operators let these go on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deltasync.core.words import LONGEST_TEXT


@dataclass(frozen=True)
class Quarantine:
    """Which versions these are.

    Attributes:
        first: the first one.
        newest: the newest one.
        versions: how many they are; of those between, others may be good.
        reason: why the first one is kept back, in words.
    """

    first: int
    newest: int
    versions: int
    reason: str

    @property
    def words(self) -> str:
        """Which they are, and why, in a line of bounded length."""
        if self.versions == 1:
            which = f"version {self.first} is"
        else:
            which = f"{self.versions} versions from {self.first} to {self.newest} are"
        return f"{which} in quarantine: {self.reason}"[:LONGEST_TEXT]


def extended(before: Quarantine | None, version: int, reason: str) -> Quarantine:
    """A quarantine with one version more; it may be in there already, where it could not be sealed at first."""
    if before is None:
        return Quarantine(version, version, 1, reason[:LONGEST_TEXT])
    if version <= before.newest:
        return before
    return replace(before, newest=version, versions=before.versions + 1)


def quarantine_record(quarantine: Quarantine | None) -> dict[str, Any]:
    """What a record says of a quarantine: nothing where there is none."""
    return {"quarantine": asdict(quarantine)} if quarantine else {}


def quarantine_of_record(record: Mapping[str, Any]) -> Quarantine | None:
    """The quarantine that a record names; None if there is none."""
    found = record.get("quarantine")
    return Quarantine(found["first"], found["newest"], found["versions"], found["reason"]) if found else None
