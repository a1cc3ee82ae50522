"""Which kept versions consumers follow, perhaps behind another consumer, and objections to what one serves."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.base.words import LONGEST_TEXT, duration, listed, utc
from deltasync.checkpoints.kept_version import KeptVersion, kept_of_record, kept_record
from deltasync.consumers.serving_history import HistoryLine, seconds_since_held
from deltasync.core.seal import SealHistory

# What a request to follow a version calls the newest one.
LIVE = "live"
# What a consumer at a distance does on an objection.
STAY, BACK = "stay", "back"


@dataclass(frozen=True)
class RolloutDelay:
    """How a consumer follows another one, and when it moves to the next kept version.

    Attributes:
        after: the name of the other consumer.
        behind_seconds: how long its replicas must go on since all of them held a version, without an objection.
        on_objection: `stay` at the version, or go `back` to the one before.
        before: the version before the present one; None at the start, and after it went back.

    Raises:
        InvalidInput: the value is not one of the allowed ones.
    """

    after: str
    behind_seconds: float
    on_objection: str = STAY
    before: KeptVersion | None = None

    def __post_init__(self) -> None:
        if self.behind_seconds < 0:
            raise InvalidInput(f"behind_seconds: {self.behind_seconds}, expected 0 or more")
        if self.on_objection not in (STAY, BACK):
            raise InvalidInput(f"on_objection: {self.on_objection!r}, expected {STAY} or {BACK}")

    @property
    def description(self) -> str:
        """The other consumer and the distance, in words."""
        return f"{duration(self.behind_seconds)} behind consumer {self.after!r}"


@dataclass(frozen=True)
class Follow:
    """What a consumer follows instead of the newest version: its replicas get exactly this version.

    Attributes:
        kept: the kept version.
        since_unix_ns: when it began, nanoseconds since 1970.
        by: name of the person or program that requested it.
        distance: how it goes on to later versions by itself; None = it stays at this one.
    """

    kept: KeptVersion
    since_unix_ns: int
    by: str
    distance: RolloutDelay | None = None

    @property
    def description(self) -> str:
        """The version, the start, the author and the distance, in words."""
        distance = f", {self.distance.description}" if self.distance else ""
        return f"{self.kept.description} since {utc(self.since_unix_ns)} by {self.by}{distance}"

    @property
    def versions(self) -> list[KeptVersion]:
        """The kept versions that it needs."""
        before = self.distance.before if self.distance else None
        return [self.kept, before] if before else [self.kept]

    @property
    def ids(self) -> set[str]:
        """The ids of the kept versions that it needs."""
        return {each.id for each in self.versions}

    def gone_on(self, kept: KeptVersion, now_unix_ns: int, by: str) -> "Follow":
        """The same distance at another version. After going back, it cannot go back further."""
        if self.distance is None:
            return Follow(kept, now_unix_ns, by)
        before = self.kept if kept.version > self.kept.version else None
        return Follow(kept, now_unix_ns, by, replace(self.distance, before=before))


@dataclass(frozen=True)
class Objection:
    """A consumer's objection to what it serves. Consumers that follow it at a distance get no later version.

    Attributes:
        since_unix_ns: when it was raised, nanoseconds since 1970.
        by: name of the person or program that raised it.
        reason: their reason.
        number: how many objections the consumer had raised, with this one.
        until_unix_ns: when it was withdrawn; None = it is in force.
        until_id: the newest checkpoint then. Followers get no version that was kept before: it may be a bad one.

    Raises:
        InvalidInput: the reason is empty, too long, or not printable.
    """

    since_unix_ns: int
    by: str
    reason: str
    number: int = 1
    until_unix_ns: int | None = None
    until_id: str = ""

    def __post_init__(self) -> None:
        if not 0 < len(self.reason) <= LONGEST_TEXT or not self.reason.isprintable():
            raise InvalidInput(f"reason: use 1 to {LONGEST_TEXT} printable characters in one line")

    @property
    def in_force(self) -> bool:
        """Whether it has not been withdrawn."""
        return self.until_unix_ns is None

    @property
    def withdrawn(self) -> int:
        """The number of the consumer's objections that have been withdrawn."""
        return self.number - 1 if self.in_force else self.number

    @property
    def description(self) -> str:
        """The start, the author and the reason, in words."""
        return f"objects since {utc(self.since_unix_ns)} by {self.by}: {self.reason}"


def next_version(
    follows: Follow | None,
    distance: RolloutDelay,
    versions: Sequence[KeptVersion],
    lines: Sequence[HistoryLine],
    objection: Objection | None,
) -> tuple[KeptVersion | None, str]:
    """Choose the kept version that a consumer at a distance moves to.

    Args:
        follows: what it follows now; None = nothing yet.
        distance: its distance.
        versions: kept versions, oldest first.
        lines: the history of the other consumer, oldest first; the last line shows what is so now.
        objection: the last objection of the other consumer; None if it never raised one.

    Returns:
        The version, or None to stay; and the reason in words.
    """
    after = f"consumer {distance.after!r}"
    if objection and objection.in_force:
        if distance.on_objection == BACK and distance.before:
            return distance.before, f"goes back, because {after} {objection.description}"
        return None, f"stays, because {after} {objection.description}"
    later = [each for each in versions if follows is None or each.version > follows.kept.version]
    if objection and later:
        later = [each for each in later if each.id > objection.until_id]
        if not later:
            return None, f"no version has been kept since {after} withdrew its objection"
    if not later:
        return None, "no later version is kept"
    if not lines or not lines[-1].fleet:
        return None, f"{after} has no connected replica"
    behind = [name for name, held in lines[-1].replicas.items() if held < later[0].version]
    waits = f"not all replicas of {after} have held a later kept version" + (
        f", behind are {listed(behind)}" if behind else ""
    )
    since_held = seconds_since_held(lines, objection.withdrawn if objection else 0)
    for kept in reversed(later):
        if (seconds := since_held.get(kept.seal.checksum)) is None:
            continue
        left = distance.behind_seconds - seconds
        if left <= 0:
            return kept, f"{after} has gone on for {duration(seconds)} since it held {kept.description}"
        waits = f"{after} holds or has held {kept.description}, {duration(left)} to go"
    return None, waits


def check_past(kept: KeptVersion, seals: SealHistory) -> None:
    """Check that a kept version belongs to the past of a model with these seals, as far as they are known.

    Raises:
        Contradiction: it does not, for example after a restore.
    """
    checksum = seals.checksum_of(kept.version)
    if kept.version > seals.newest_version or checksum not in (0, kept.seal.checksum):
        raise Contradiction(
            f"kept {kept.description} belongs to a past that the model has discarded; its newest version is "
            f"{seals.newest_version}: follow another version"
        )


def follow_record(follows: Follow | None, objection: Objection | None) -> dict[str, Any]:
    """The fields in the record of a consumer; none if it follows the newest version and has never objected."""
    fields = dict[str, Any]()
    if follows:
        record = {"kept": kept_record(follows.kept), "since_unix_ns": follows.since_unix_ns, "by": follows.by}
        fields["follows"] = record | ({"distance": asdict(follows.distance)} if follows.distance else {})
    if objection:
        fields["objection"] = asdict(objection)
    return fields


def follow_of_record(record: Mapping[str, Any]) -> Follow | None:
    """What the consumer of a record follows; None for the newest version."""
    if (fields := record.get("follows")) is None:
        return None
    distance = None
    if stored := fields.get("distance"):
        before = kept_of_record(stored["before"]) if stored["before"] else None
        distance = RolloutDelay(**{**stored, "before": before})
    return Follow(kept_of_record(fields["kept"]), fields["since_unix_ns"], fields["by"], distance)


def objection_of_record(record: Mapping[str, Any]) -> Objection | None:
    """The last objection of the consumer of a record; None if it never raised one."""
    return Objection(**record["objection"]) if "objection" in record else None
