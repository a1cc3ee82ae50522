"""Kept versions that consumers follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltasync.base.errors import Contradiction
from deltasync.base.words import utc
from deltasync.checkpoints.kept import KeptVersion, kept_of_record, kept_record
from deltasync.core.seal import SealHistory

# What a request to follow a version calls the newest one.
LIVE = "live"


@dataclass(frozen=True)
class Follow:
    """What a consumer follows instead of the newest version: its replicas get exactly this version.

    Attributes:
        kept: the kept version.
        since_unix_ns: when it began, nanoseconds since 1970.
        by: name of the person or program that requested it.
    """

    kept: KeptVersion
    since_unix_ns: int
    by: str

    @property
    def words(self) -> str:
        """The version, the start and the author, in words."""
        return f"{self.kept.words} since {utc(self.since_unix_ns)} by {self.by}"


def check_past(kept: KeptVersion, seals: SealHistory) -> None:
    """Check that a kept version belongs to the past of a model with these seals, as far as they are known.

    Raises:
        Contradiction: it does not, for example after a restore.
    """
    checksum = seals.checksum_of(kept.version)
    if kept.version > seals.newest_version or checksum not in (0, kept.seal.checksum):
        raise Contradiction(
            f"kept {kept.words} belongs to a past that the model has discarded; its newest version is "
            f"{seals.newest_version}: follow another version"
        )


def follow_record(follows: Follow | None) -> dict[str, Any]:
    """The fields in the record of a consumer; none if it follows the newest version."""
    if follows is None:
        return {}
    return {
        "follows": {
            "kept": kept_record(follows.kept),
            "since_unix_ns": follows.since_unix_ns,
            "by": follows.by,
        }
    }


def follow_of_record(record: Mapping[str, Any]) -> Follow | None:
    """What the consumer of a record follows; None for the newest version."""
    if (fields := record.get("follows")) is None:
        return None
    return Follow(kept_of_record(fields["kept"]), fields["since_unix_ns"], fields["by"])
