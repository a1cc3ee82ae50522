"""All errors that deltasync raises on purpose.

    DeltasyncError
    ├── InvalidInput        an input that can never be right; nothing was changed
    ├── NotFound            a name that does not exist; the message lists the existing names
    ├── Contradiction       valid by itself, but at odds with the service's data
    │   └── RunRefused      the service does not admit this run, however often it tries
    ├── Superseded          a newer stream, run or cut has taken this one's place
    ├── NotPermitted        the caller lacks the necessary role or token
    ├── LimitReached        a limit of the service is exceeded; the message names the limit
    ├── Damaged             rows do not match their digests; nothing was changed
    ├── StorageFailed       files or the log could not be written or read
    ├── ServiceFailed       (client) an internal error of the service; see its log
    ├── ServiceUnavailable  the service cannot be reached, or is draining; try again
    │   └── NotOwner        this process does not own the model; the error names the owner if known
    └── ResyncRequired      the service lacks the rows on which this run builds: publish every row

`deltasync.wire.errors` maps them to gRPC codes and HTTP statuses, and back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltasync.core.position import Position
    from deltasync.core.rows import Ids


class DeltasyncError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        detail: the rest of the text, with names, runs and counts, for callers with role `read`. Others get the
            text without it.
    """

    def __init__(self, *text: object, detail: str = "") -> None:
        super().__init__(*text)
        self.detail = detail

    def __str__(self) -> str:
        return self.text + self.detail

    @property
    def text(self) -> str:
        """The text for callers without role `read`."""
        return super().__str__()


class InvalidInput(DeltasyncError, ValueError):
    """An input that can never be right; nothing was changed."""


class NotFound(DeltasyncError, LookupError):
    """A name that does not exist; the message lists the existing names."""


class Contradiction(DeltasyncError):
    """Valid by itself, but at odds with the service's data."""


class RunRefused(Contradiction):
    """The service does not admit this run, however often it tries."""


class Superseded(DeltasyncError):
    """A newer stream, run or cut has taken this one's place."""


class NotPermitted(DeltasyncError):
    """The caller lacks the necessary role or token."""


class LimitReached(DeltasyncError):
    """A limit of the service is exceeded; the message names the limit."""


class Damaged(DeltasyncError):
    """Rows do not match their digests; nothing was changed."""


class StorageFailed(DeltasyncError):
    """Files or the log could not be written or read."""


class ServiceFailed(DeltasyncError):
    """An internal error of the service; see its log."""


class ServiceUnavailable(DeltasyncError):
    """The service cannot be reached, or is draining."""


class NotOwner(ServiceUnavailable):
    """This process of the service does not own the model.

    Attributes:
        owner: the owner, or the next one; None if neither is known.
    """

    def __init__(self, *text: object, detail: str = "", owner: "Owner | None" = None) -> None:
        super().__init__(*text, detail=detail)
        self.owner = owner


class ResyncRequired(DeltasyncError):
    """The service lacks the rows on which this run builds: publish every row, or fewer if an attribute allows it.

    Attributes:
        head: the newest position of the service, or None. If this run had that position, compare the seals, open a
            new publisher with `continues=head` and publish all changes since then.
        changed: rows of this rank that were published after the position of this run, as table names, each once,
            and ids ([n] int64, ascending). The next part must have their current values in addition to new
            changes. None if every row must be published.
    """

    def __init__(
        self,
        *text: object,
        detail: str = "",
        head: "Position | None" = None,
        changed: "Sequence[tuple[str, Ids]] | None" = None,
    ) -> None:
        super().__init__(*text, detail=detail)
        self.head = head
        self.changed = changed


@dataclass(frozen=True)
class Owner:
    """A process of the service, and the part of a model that it owns.

    Attributes:
        process: its name among the processes of the service.
        grpc: its gRPC address, HOST:PORT.
        http: its HTTP URL.
        epoch: grows with every change of owner; the owner with the largest epoch counts.
        share: number of its share of the model's rows, from 0.
        shares: number of shares, 1 if the process owns the whole model.
    """

    process: str
    grpc: str
    http: str
    epoch: int = 0
    share: int = 0
    shares: int = 1
