"""A cut that is published and not known to be sealed."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from deltasync.client import Part, Position, Publisher
from deltasync.trainer.tracking.delta import Token
from deltasync.trainer.tracking.pending_delta import PendingDelta


@dataclass(frozen=True)
class PendingCut:
    """One rank's part of a cut.

    Attributes:
        part: what was published.
        token: acknowledges its rows.
        changes: the tracker's when its rows were read.
        sealed: the position of the cut.
    """

    part: Part
    token: Token
    changes: int
    sealed: "Future[Position]"


def published(publisher: Publisher, read: PendingDelta, changes: int, what: Mapping[str, Any]) -> PendingCut:
    """Publish a cut once its rows have arrived in host memory. In a thread that may wait for that.

    Args:
        publisher: does it.
        read: the rows.
        changes: the tracker's when they were read.
        what: the part's other fields.
    """
    part = Part(rows=read.result.batches(), **what)
    return PendingCut(part, read.result.token, changes, publisher.publish(part))
