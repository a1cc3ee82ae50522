"""Which kept version a consumer follows, perhaps behind another one, and the history that decides when it goes on.

The history of a consumer is in the log: lines with the versions that its replicas had proven at one moment. A new
line is written at most once a second when something has changed, and once a minute otherwise. Each history has its
own clock, which numbers its lines and runs only while the service looks at the consumer. So the difference of two
lines is the time that the service watched, however long it was away and whatever the wall clock did.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.base.words import LONGEST_TEXT, duration, listed, utc
from deltasync.checkpoints.kept_version import KeptVersion, kept_of_record
from deltasync.core.seal import SealHistory
from deltasync.log.log_store import LogStore
from deltasync.log.records import name_of, pack_json, reading, unpack_json

# What a request to follow a version calls the newest one.
LIVE = "live"
# What a consumer at a distance does on an objection.
STAY, BACK = "stay", "back"


@dataclass(frozen=True)
class RolloutDelay:
    """How a consumer follows another one, and when it moves to the next kept version.

    Attributes:
        after: the name of the other consumer.
        behind_seconds: how long its replicas must hold a version, without an objection, before this one moves on.
        on_objection: `stay` at the version, or go `back` to the one before.
        before: the version before the present one; None at the start, and after going back.
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


def follow_of_record(fields: Mapping[str, Any] | None) -> Follow | None:
    """What the consumer of a record follows; None for the newest version."""
    if fields is None:
        return None
    distance, kept = fields["distance"], kept_of_record(fields["kept"])
    if distance:
        before = kept_of_record(distance["before"]) if distance["before"] else None
        distance = RolloutDelay(**{**distance, "before": before})
    return Follow(kept, fields["since_unix_ns"], fields["by"], distance)


# A line is written this often even if nothing has changed.
REPEAT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class HistoryLine:
    """What the replicas of a consumer held at one moment.

    `unix_ns` is the wall clock's time, a label. `watched_ns` is the time on the history's own clock: differences
    are durations. `after_ns` is that of the line before, which shows whether a line is missing.

    `number` is the newest release that a replica had proven: a version, or with a policy the number of a release.
    `version`, `step`, `event_time_unix_ns`, `rows` and `bytes` are those of this release; the time of events is
    null if unknown. `follows` is the name or number of the kept version that the consumer followed, empty for the
    newest version. `replicas` has the version that each replica had proven by its checksums, 0 for none; guests do
    not count. Replicas with mode ids have no rows to prove, so their acknowledgements count.

    `fleet` has an id of the process of each connected replica, ascending. `held` has the seals of versions that
    every one of them has held exactly, now or since the line before. `objections` is the number of objections that
    had been withdrawn.
    """

    unix_ns: int
    watched_ns: int = 0
    after_ns: int = 0
    number: int = 0
    version: int = 0
    step: int = 0
    event_time_unix_ns: int | None = None
    rows: int = 0
    bytes: int = 0
    follows: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)
    fleet: tuple[str, ...] = ()
    held: tuple[int, ...] = ()
    objections: int = 0


@dataclass(frozen=True, kw_only=True)
class HistoryPage:
    """Lines of a history, oldest first. A page has at most 10,000 versions of replicas, but at least one line.

    `next_ns` is the `watched_ns` of the first line that has no room: ask again from there. Null after the last
    line.
    """

    lines: Sequence[HistoryLine]
    next_ns: int | None


def page_of(lines: Iterable[HistoryLine], last: int, room: int) -> HistoryPage:
    """The first page of lines: at most `last` lines, and `room` versions of replicas."""
    page = list[HistoryLine]()
    for line in islice(lines, last):
        room -= max(1, len(line.replicas))
        if page and room < 0:
            return HistoryPage(lines=page, next_ns=line.watched_ns)
        page.append(line)
    return HistoryPage(lines=page, next_ns=None)


def history_stream(consumer: str) -> str:
    """The name of the log's stream with the lines of a consumer, numbered by the history's clock."""
    return f"history/{consumer}"


def pack_line(line: HistoryLine) -> bytes:
    """Encode a line. Its names repeat in each line, so that it is compressed."""
    return zlib.compress(pack_json(asdict(line)))


def read_lines(log: LogStore, consumer: str, first_ns: int) -> Iterator[HistoryLine]:
    """Read the lines of a consumer from a time of its history's clock on, oldest first. Blocks."""
    for record in log.read(history_stream(consumer), max(0, first_ns)):
        with reading(name_of(history_stream(consumer), record.number)):
            try:
                fields = unpack_json(zlib.decompress(record.payload))
            except zlib.error as error:
                raise ValueError(str(error)) from error
            yield HistoryLine(**fields | {name: tuple(fields[name]) for name in ("fleet", "held")})


def seconds_since_held(lines: Sequence[HistoryLine], objections: int) -> dict[int, float]:
    """How long the present replicas have gone on since all of them held a version exactly, by its seal's checksum.

    `lines` are those of a consumer, oldest first; the last one shows the present. Time counts between two lines
    whose connected processes are those of the last line, and after the last withdrawal of `objections`. A replica
    that joins, restarts or is lost starts the time again. A version that one replica skipped has no time.
    """
    if not lines or not lines[-1].fleet or lines[-1].objections != objections:
        return {}
    watched_ns, held_at, before = 0, dict[int, int](), None
    for line in lines:
        if not set(line.fleet).issubset(lines[-1].fleet):  # One that joined later, and was lost since.
            watched_ns, held_at = 0, {}
        if line.fleet != lines[-1].fleet or line.objections != objections:
            before = None
            continue
        if before and line.after_ns == before.watched_ns:
            watched_ns += line.watched_ns - before.watched_ns
        for seal in line.held:
            held_at.setdefault(seal, watched_ns)
        before = line
    return {seal: (watched_ns - at) / 1e9 for seal, at in held_at.items()}


def next_version(
    follows: Follow | None,
    distance: RolloutDelay,
    versions: Sequence[KeptVersion],
    lines: Sequence[HistoryLine],
    objection: Objection | None,
) -> tuple[KeptVersion | None, str]:
    """Choose the kept version that a consumer at a distance moves to, or None to stay; and the reason in words.

    Args:
        follows: what it follows now; None = nothing yet.
        distance: its distance.
        versions: kept versions, oldest first.
        lines: the history of the other consumer, oldest first; the last line shows the present.
        objection: the last objection of the other consumer; None if it never raised one.
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
    """Check that a kept version belongs to the past of a model. A restore may have discarded it."""
    checksum = seals.checksum_of(kept.version)
    if kept.version > seals.newest_version or checksum not in (0, kept.seal.checksum):
        raise Contradiction(
            f"kept {kept.description} belongs to a past that the model has discarded; its newest version is "
            f"{seals.newest_version}: follow another version"
        )
