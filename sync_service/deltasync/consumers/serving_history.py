"""The history of a consumer: which version each of its replicas served. Lines in the log.

A line has the versions that the replicas had proven at one moment. A new one is written at most once a second when
something has changed, and once a minute otherwise.

Each history has its own clock, which numbers its lines and runs only while the service looks at the consumer. So
the difference of two lines is the time that the service saw, however long it was away and whatever the clock did.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from deltasync.log.log_store import LogStore
from deltasync.log.records import name_of, pack_json, reading, unpack_json

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
    """Read the lines of a consumer from a time of its history's clock on, oldest first. Blocks.

    Raises:
        StorageFailed: a line is damaged, or the log cannot be read at present.
    """
    for record in log.read(history_stream(consumer), max(0, first_ns)):
        with reading(name_of(history_stream(consumer), record.number)):
            try:
                fields = unpack_json(zlib.decompress(record.payload))
            except zlib.error as error:
                raise ValueError(str(error)) from error
            yield HistoryLine(**fields | {name: tuple(fields[name]) for name in ("fleet", "held")})


def seconds_since_held(lines: Sequence[HistoryLine], objections: int) -> dict[int, float]:
    """How long the present replicas have gone on since all of them held a version exactly.

    Only the time between two lines counts in which the connected processes were those of the last line, and which
    follow the withdrawal of the last objection. So a replica that joins, restarts or is lost begins the time anew.

    Args:
        lines: lines of a consumer, oldest first; the last one shows what is so now.
        objections: number of objections that have been withdrawn by now.

    Returns:
        Seconds by the checksum of the version's seal, without versions that one of them has skipped.
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
