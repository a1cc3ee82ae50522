"""Where a feed stands, for those who ask how far its replicas are behind."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deltasync.core.policy import Policy
from deltasync.core.seal import Seal
from deltasync.core.stamps import StampedTable
from deltasync.core.steady_clock import Moment
from deltasync.core.tables import TableSpec
from deltasync.feeds.statistics import Backlog, ReleaseStatistics


@dataclass(frozen=True)
class TableStanding:
    """One table that a consumer follows.

    Attributes:
        spec: the table.
        row_bytes: bytes that a row takes as it is sent: id and values, or id and norm.
        lacking: how many rows a replica at an offset does not hold as the model has them; never too few.
        backlog: what the last release left of it; None where that is not known.
    """

    spec: TableSpec
    row_bytes: int
    lacking: Callable[[int], int]
    backlog: Backlog | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name


def _unknown(_version: int) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a feed stands. Taken in the event loop, where it costs next to nothing; then read in any thread, while
    cuts and releases go on: rows are counted as of then.

    Attributes:
        history: the id of the history that offsets belong to.
        seals: those of the model that are kept, oldest first.
        tables: finds the tables that the consumer follows.
        version_of: the version of the rows that a replica at an offset holds.
        seal_of: the checksum of the seal that an offset has; 0 where it is not known.
        seconds_since: how long ago a version was sealed, by a clock that nobody sets; None where it does not know.
        newest_release: its number, 0 before the first one; None where offsets are versions.
        release: what the newest release took and left; None if there is none.
        released: when it was made; likewise.
        compared: whether the backlogs are as of the newest version.
        trouble: why the policy is not in force; empty if it is.
        failure: the error that keeps replicas from what is new, and is tried again; empty if there is none.
        unpublished: that there is nothing to hold yet; empty if there is something.
        refused: why the last cut was refused, for what was in it; empty if it was not.
        unsaved: why the last checkpoint of the model could not be written or copied; empty if it could.
        unfit: that no table fits what the consumer wants; empty if one does.
    """

    history: str
    seals: Sequence[Seal]
    tables: Callable[[], list[TableStanding]]
    version_of: Callable[[int], int]
    seal_of: Callable[[int], int]
    seconds_since: Callable[[int], float | None] = _unknown
    newest_release: int | None = None
    release: ReleaseStatistics | None = None
    released: Moment | None = None
    compared: bool = True
    trouble: str = ""
    failure: str = ""
    unpublished: str = ""
    refused: str = ""
    unsaved: str = ""
    unfit: str = ""


def nothing_published(model: str, others: Iterable[str]) -> Standing:
    """Where the consumers of a model stand of which nothing is published, beside `others`."""
    text = f"nothing of model {model!r} is published; models: {', '.join(sorted(others)) or 'none yet'}"
    return Standing(
        history="", seals=(), tables=list, version_of=lambda _: 0, seal_of=lambda _: 0, unpublished=text
    )


def table_standing(table: StampedTable, newest: int, policy: Policy) -> TableStanding:
    """Where a model's table stands, to replicas that read it as it is; `newest` is the model's newest version."""
    counts = table.counts
    return TableStanding(
        spec=table.spec,
        row_bytes=policy.row_bytes(table.spec),
        # Whoever has the newest version lacks nothing of it, though a later one may be there by now.
        lacking=lambda version: counts.after(version) if version < newest else 0,
    )
