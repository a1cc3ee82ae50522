"""Where a feed stands, for those who ask how far its replicas are behind."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from deltasync.core.seal import Seal
from deltasync.feeds.statistics import Backlog, ReleaseStatistics


@dataclass(frozen=True)
class TableStanding:
    """One table that a consumer follows.

    Attributes:
        name: its name.
        row_bytes: bytes that a row takes as it is sent: id and values, or id and norm.
        lacking: how many rows a replica at an offset does not hold as the model has them; never too few.
        backlog: what the last release left of it; None where that is not known.
    """

    name: str
    row_bytes: int
    lacking: Callable[[int], int]
    backlog: Backlog | None = None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a feed stands. Taken in the event loop, where it costs next to nothing; then read in any thread, while
    cuts and releases go on: rows are counted as of then.

    Attributes:
        history: the id of the history that offsets belong to.
        seals: those of the model that are kept, oldest first.
        tables: finds the tables that the consumer follows.
        version_of: the version of the rows that a replica at an offset holds.
        newest_release: its number, 0 before the first one; None where offsets are versions.
        release: what the newest release took and left; None if there is none.
        compared: whether the backlogs are as of the newest version.
        trouble: why the policy is not in force; empty if it is.
        failure: the error that keeps replicas from what is new, and is tried again; empty if there is none.
        unpublished: that there is nothing to hold yet; empty if there is something.
        unfit: that no table fits what the consumer wants; empty if one does.
    """

    history: str
    seals: Sequence[Seal]
    tables: Callable[[], list[TableStanding]]
    version_of: Callable[[int], int]
    newest_release: int | None = None
    release: ReleaseStatistics | None = None
    compared: bool = True
    trouble: str = ""
    failure: str = ""
    unpublished: str = ""
    unfit: str = ""


def nothing_published(model: str, others: Iterable[str]) -> Standing:
    """Where the consumers of a model stand of which nothing is published, beside `others`."""
    text = f"nothing of model {model!r} is published; models: {', '.join(sorted(others)) or 'none yet'}"
    return Standing(history="", seals=(), tables=list, version_of=lambda _: 0, unpublished=text)
