"""Pauses of consumers, and the versions in quarantine that they are kept from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deltasync.base.clock import Moment
from deltasync.base.errors import InvalidInput
from deltasync.base.words import LONGEST_TEXT, utc


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


# Who changes what nobody has asked for.
ITSELF = "the service itself"


@dataclass(frozen=True)
class Pause:
    """What holds a consumer's replicas.

    Attributes:
        since_unix_ns: when it began, nanoseconds since 1970.
        by: who has asked for it.
        reason: why, in the words of who has; may be empty.
        quarantine: the versions that it is kept from besides; None if there is none.
        since_ns: when it began, by `steady_ns`; None if that was before the service started.

    Raises:
        InvalidInput: a reason that is too long, or is not printable.
    """

    since_unix_ns: int
    by: str
    reason: str = ""
    quarantine: Quarantine | None = None
    since_ns: int | None = field(default=None, compare=False)

    @classmethod
    def now(cls, by: str, reason: str = "", quarantine: Quarantine | None = None) -> "Pause":
        """One that begins now."""
        now = Moment.now()
        return cls(now.unix_ns, by, reason, quarantine, now.steady_ns)

    def __post_init__(self) -> None:
        if len(self.reason) > LONGEST_TEXT or not self.reason.isprintable():
            raise InvalidInput(f"reason: expected at most {LONGEST_TEXT} printable characters in one line")

    @property
    def since(self) -> str:
        """When it began, in UTC."""
        return utc(self.since_unix_ns)

    @property
    def why(self) -> str:
        """All reasons; may be empty."""
        kept_from = self.quarantine.words if self.quarantine else ""
        return "; ".join(filter(None, [kept_from, self.reason]))[:LONGEST_TEXT]

    @property
    def words(self) -> str:
        """Since when, by whom and why."""
        return f"paused since {self.since} by {self.by}{f': {self.why}' if self.why else ''}"

    def behind_ns(self, next_sealed: Moment | None, min_interval_seconds: float) -> int:
        """For how long a replica had not held the newest when the pause began, nanoseconds: no longer than that,
        since it is kept from what is newer on purpose.

        Args:
            next_sealed: when the version after that of its rows was sealed; None if there is none.
            min_interval_seconds: so long its policy keeps a version back.
        """
        if next_sealed is None:
            return 0
        began = Moment(self.since_unix_ns, self.since_ns)
        return max(0, began.after_ns(next_sealed) - int(min_interval_seconds * 1e9))


def joined(before: Pause | None, now: Pause) -> Pause:
    """The pause that there is once a consumer is paused again: the one of before goes on, for both reasons."""
    if before is None:
        return now
    before = replace(before, quarantine=now.quarantine or before.quarantine)
    if now.reason in before.reason:
        return before
    return replace(before, reason="; ".join(filter(None, [now.reason, before.reason]))[:LONGEST_TEXT])


def pause_record(pause: Pause | None) -> dict[str, Any]:
    """What the record of a consumer says of its pause: nothing where there is none."""
    if pause is None:
        return {}
    said = {"since_unix_ns": pause.since_unix_ns, "by": pause.by, "reason": pause.reason}
    return {"pause": said} | quarantine_record(pause.quarantine)


def pause_of_record(record: Mapping[str, Any]) -> Pause | None:
    """The pause that the record of a consumer names; None if there is none."""
    return Pause(**record["pause"], quarantine=quarantine_of_record(record)) if "pause" in record else None
