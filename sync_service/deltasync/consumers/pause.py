"""Pauses of consumers, and versions in quarantine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deltasync.base.clock import Moment
from deltasync.base.errors import InvalidInput
from deltasync.base.words import LONGEST_TEXT, utc


@dataclass(frozen=True)
class Quarantine:
    """Versions that are withheld from consumers.

    Attributes:
        first: the first of these versions.
        newest: the newest of these versions.
        versions: their number; other versions between first and newest may be good.
        reason: why the first one is withheld, in words.
    """

    first: int
    newest: int
    versions: int
    reason: str

    @property
    def description(self) -> str:
        """The versions and the reason, in a line of bounded length."""
        if self.versions == 1:
            which = f"version {self.first} is"
        else:
            which = f"{self.versions} versions from {self.first} to {self.newest} are"
        return f"{which} in quarantine: {self.reason}"[:LONGEST_TEXT]


def extended(before: Quarantine | None, version: int, reason: str) -> Quarantine:
    """Add a version to a quarantine. It may already be there, after a failed attempt to seal it."""
    if before is None:
        return Quarantine(version, version, 1, reason[:LONGEST_TEXT])
    if version <= before.newest:
        return before
    return replace(before, newest=version, versions=before.versions + 1)


def quarantine_record(quarantine: Quarantine | None) -> dict[str, Any]:
    """The fields of a quarantine in a record; none if there is no quarantine."""
    return {"quarantine": asdict(quarantine)} if quarantine else {}


def quarantine_of_record(record: Mapping[str, Any]) -> Quarantine | None:
    """The quarantine in a record; None if there is none."""
    fields = record.get("quarantine")
    return Quarantine(**fields) if fields else None


# The author of changes that the service makes by itself.
ITSELF = "the service itself"


@dataclass(frozen=True)
class Pause:
    """A pause of a consumer: its replicas keep their rows.

    Attributes:
        since_unix_ns: when it began, nanoseconds since 1970.
        by: name of the person or program that requested it.
        reason: their reason; may be empty.
        quarantine: versions that are withheld from the consumer; None if there are none.
        since_ns: when it began, by `steady_ns`; None if that was before the service started.

    Raises:
        InvalidInput: the reason is too long, or is not printable.
    """

    since_unix_ns: int
    by: str
    reason: str = ""
    quarantine: Quarantine | None = None
    since_ns: int | None = field(default=None, compare=False)

    @classmethod
    def now(cls, by: str, reason: str = "", quarantine: Quarantine | None = None) -> "Pause":
        """A pause that begins now."""
        now = Moment.now()
        return cls(now.unix_ns, by, reason, quarantine, now.steady_ns)

    def __post_init__(self) -> None:
        if len(self.reason) > LONGEST_TEXT or not self.reason.isprintable():
            raise InvalidInput(f"reason: use at most {LONGEST_TEXT} printable characters in one line")

    @property
    def since(self) -> str:
        """When it began, in UTC."""
        return utc(self.since_unix_ns)

    @property
    def why(self) -> str:
        """All reasons; may be empty."""
        withheld = self.quarantine.description if self.quarantine else ""
        return "; ".join(filter(None, [withheld, self.reason]))[:LONGEST_TEXT]

    @property
    def description(self) -> str:
        """The start, the author and the reason, in words."""
        return f"paused since {self.since} by {self.by}{f': {self.why}' if self.why else ''}"

    def behind_ns(self, next_sealed: Moment | None, min_interval_seconds: float) -> int:
        """Nanoseconds by which a replica was behind when the pause began. The pause itself does not count.

        Args:
            next_sealed: when the version after that of its rows was sealed; None if there is none.
            min_interval_seconds: how long its policy holds a version back.
        """
        if next_sealed is None:
            return 0
        began = Moment(self.since_unix_ns, self.since_ns)
        return max(0, began.after_ns(next_sealed) - int(min_interval_seconds * 1e9))


def joined(before: Pause | None, now: Pause) -> Pause:
    """Join the pause of a consumer that is paused again: the earlier one continues, with both reasons."""
    if before is None:
        return now
    before = replace(before, quarantine=now.quarantine or before.quarantine)
    if now.reason in before.reason:
        return before
    return replace(before, reason="; ".join(filter(None, [now.reason, before.reason]))[:LONGEST_TEXT])


def pause_record(pause: Pause | None) -> dict[str, Any]:
    """The fields of a pause in the record of a consumer; none if there is no pause."""
    if pause is None:
        return {}
    fields = {"since_unix_ns": pause.since_unix_ns, "by": pause.by, "reason": pause.reason}
    return {"pause": fields} | quarantine_record(pause.quarantine)


def pause_of_record(record: Mapping[str, Any]) -> Pause | None:
    """The pause in the record of a consumer; None if there is none."""
    return Pause(**record["pause"], quarantine=quarantine_of_record(record)) if "pause" in record else None
