"""The history of a consumer: which version each of its replicas served, by time. Lines in the log.

A line has the versions that the replicas had proven at one moment. A new one is written at most once a second when
they have changed, and once a minute otherwise, which proves that nothing has changed.
"""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice

from deltasync.log.log_store import LogStore
from deltasync.log.records import name_of, pack_json, reading, unpack_json

# A line is written this often even if nothing has changed.
REPEAT_SECONDS = 60.0
LONGEST_GAP_NS = int(2 * REPEAT_SECONDS * 1e9)


@dataclass(frozen=True, kw_only=True)
class HistoryLine:
    """What the replicas of a consumer held at one moment.

    `number` is the newest release that a replica had proven: a version, or with a policy the number of a release.
    `version`, `step`, `event_time_unix_ns`, `rows` and `bytes` are those of this release; the time of events is
    null if unknown. `follows` is the name or number of the kept version that the consumer followed, empty for the
    newest version. `replicas` has the version that each replica had proven by its checksums, 0 for none; guests do
    not count. Replicas with mode ids have no rows to prove, so their acknowledgements count.
    """

    unix_ns: int
    number: int = 0
    version: int = 0
    step: int = 0
    event_time_unix_ns: int | None = None
    rows: int = 0
    bytes: int = 0
    follows: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)

    @property
    def proven_by_all(self) -> int:
        """The version that every replica had proven, or a later one; 0 without replicas."""
        return min(self.replicas.values(), default=0)


@dataclass(frozen=True, kw_only=True)
class HistoryPage:
    """Lines of a history, oldest first. A page has at most 10,000 versions of replicas, but at least one line.

    `next_unix_ns` is the time of the first line that has no room: ask again from there. Null after the last line.
    """

    lines: Sequence[HistoryLine]
    next_unix_ns: int | None


def page_of(lines: Iterable[HistoryLine], last: int, room: int) -> HistoryPage:
    """The first page of lines: at most `last` lines, and `room` versions of replicas."""
    page = list[HistoryLine]()
    for line in islice(lines, last):
        room -= max(1, len(line.replicas))
        if page and room < 0:
            return HistoryPage(lines=page, next_unix_ns=line.unix_ns)
        page.append(line)
    return HistoryPage(lines=page, next_unix_ns=None)


def history_stream(consumer: str) -> str:
    """The name of the log's stream with the lines of a consumer, numbered by their time."""
    return f"history/{consumer}"


def pack_line(line: HistoryLine) -> bytes:
    """Encode a line. Its names repeat in each line, so that it is compressed."""
    return zlib.compress(pack_json(asdict(line)))


def read_lines(log: LogStore, consumer: str, since_seconds: float) -> Iterator[HistoryLine]:
    """Read the lines of a consumer of the last seconds, oldest first. Blocks.

    Raises:
        StorageFailed: a line is damaged, or the log cannot be read at present.
    """
    return read_lines_from(log, consumer, max(0, time.time_ns() - int(since_seconds * 1e9)))


def read_lines_from(log: LogStore, consumer: str, unix_ns: int) -> Iterator[HistoryLine]:
    """Like `read_lines`, for the lines from a time on."""
    for record in log.read(history_stream(consumer), unix_ns):
        with reading(name_of(history_stream(consumer), record.number)):
            try:
                fields = unpack_json(zlib.decompress(record.payload))
            except zlib.error as error:
                raise ValueError(str(error)) from error
            yield HistoryLine(**fields)


def proven_since(lines: Iterable[HistoryLine], version: int) -> int | None:
    """Since when every replica has proven a version or later ones without a break, nanoseconds since 1970.

    A time without lines is a break: the service was away, so nobody could object.

    Args:
        lines: the lines of a consumer, oldest first.
        version: the version.

    Returns:
        The time of the oldest line from which on all lines show it; None if the newest line does not.
    """
    since, newest = None, None
    for line in lines:
        if newest is not None and line.unix_ns - newest > LONGEST_GAP_NS:
            since = None
        newest = line.unix_ns
        if line.proven_by_all < version:
            since = None
        elif since is None:
            since = line.unix_ns
    return since
