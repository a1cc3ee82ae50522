"""Every error deltasync raises on purpose.

    DeltasyncError
    ├── InvalidInput        an input that can never be right; nothing was changed
    ├── NotFound            a name that does not exist; the message lists those that do
    ├── Contradiction       right in itself, but not with what the service holds
    ├── Superseded          a newer stream, run or cut has taken this one's place
    ├── NotPermitted        the caller lacks the role, or the token, that is needed
    ├── LimitReached        more than the service lets peers take; the message names the limit
    ├── Damaged             rows do not fit their digests; nothing was changed
    ├── StorageFailed       files or the log could not be written or read
    ├── ServiceFailed       (client) the service met an error of its own; its log says more
    ├── ServiceUnavailable  the service cannot be reached, or is draining; try again
    │   └── NotOwner        this process does not own the model; the error names the owner if it is known
    └── ResyncRequired      the service does not hold what this run builds on: publish every row

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
    """A name that does not exist; the message lists those that do."""


class Contradiction(DeltasyncError):
    """Right in itself, but at odds with what the service holds."""


class Superseded(DeltasyncError):
    """A newer stream, run or cut has taken this one's place."""


class NotPermitted(DeltasyncError):
    """The caller lacks the role, or the token, that is needed."""


class LimitReached(DeltasyncError):
    """More than the service lets peers take; the message names the limit."""


class Damaged(DeltasyncError):
    """Rows do not fit their digests; nothing was changed."""


class StorageFailed(DeltasyncError):
    """Files or the log could not be written or read."""


class ServiceFailed(DeltasyncError):
    """The service met an error of its own; its log says more."""


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
    """The service does not hold what this run builds on: publish every row, or fewer if one of these is given.

    Attributes:
        head: the newest position of the service, or None. If this run held it, by its seal, open a new publisher
            with `continues=head` and publish all that has changed since.
        changed: the rows of this rank that were published after what this run builds on: names of tables, each
            once, and ids ([n] int64, ascending). The next part must have their current values, beside what has
            changed. None if every row must be published.
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
    """A process of the service, and what it owns of a model.

    Attributes:
        process: its name among the processes of the service.
        grpc: its address of gRPC, HOST:PORT.
        http: its URL of HTTP.
        epoch: grows with every change of owner; the owner with the later epoch counts.
        share: number of its share of the model's rows, from 0.
        shares: number of shares: 1 while models are owned whole.
    """

    process: str
    grpc: str
    http: str
    epoch: int = 0
    share: int = 0
    shares: int = 1
