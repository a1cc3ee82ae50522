"""Every error deltasync raises on purpose.

    DeltasyncError
    ├── InvalidInput        an input that can never be right; nothing was changed
    ├── NotFound            a name that does not exist; the message lists those that do
    ├── Contradiction       right in itself, but not with what the service holds
    ├── Superseded          a newer stream, run or cut has taken this one's place
    ├── NotPermitted        whoever calls lacks the role, or the token, that is needed
    ├── LimitReached        more than the service lets peers take; the message names the limit
    ├── Damaged             rows are not those of which their digests were made; nothing was changed
    ├── StorageFailed       files or the log could not be written, or not be read back whole
    ├── ServiceFailed       (client) the service met an error of its own; its log says more
    ├── ServiceUnavailable  the service cannot be reached, or is draining; try again
    │   └── NotOwner        this process does not own the model; the error says who does, where that is known
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
        detail: what the text goes on with for those who may read what the service knows: names, runs, counts.
            Peers who may not are told the text without it.
    """

    def __init__(self, *text: object, detail: str = "") -> None:
        super().__init__(*text)
        self.detail = detail

    def __str__(self) -> str:
        return self.text + self.detail

    @property
    def text(self) -> str:
        """What everybody may be told."""
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
    """Whoever calls lacks the role, or the token, that is needed."""


class LimitReached(DeltasyncError):
    """More than the service lets peers take; the message names the limit."""


class Damaged(DeltasyncError):
    """Rows are not those of which their digests were made; nothing was changed."""


class StorageFailed(DeltasyncError):
    """Files or the log could not be written, or not be read back whole."""


class ServiceFailed(DeltasyncError):
    """The service met an error of its own; its log says more."""


class ServiceUnavailable(DeltasyncError):
    """The service cannot be reached, or is draining."""


class NotOwner(ServiceUnavailable):
    """This process of the service does not own the model.

    Attributes:
        owner: who does, or is to; None where nobody is known.
    """

    def __init__(self, *text: object, detail: str = "", owner: "Owner | None" = None) -> None:
        super().__init__(*text, detail=detail)
        self.owner = owner


class ResyncRequired(DeltasyncError):
    """The service does not hold what this run builds on: publish every row, or less where that is known.

    Attributes:
        head: the newest position of the service, where it has told it. Whoever held that, by its seal, may go on
            from there: with a publisher that `continues` it, and all that has changed since.
        changed: where the service holds what this run builds on, and more: names of tables, each once, and ids
            ([n] int64, ascending) of the rows of this rank that were published after it. The next part is to have
            them as they are now, with what has changed. None where every row is to be published.
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
        grpc: where it answers gRPC, HOST:PORT.
        http: where it answers HTTP, a URL.
        epoch: grows with every change of owners: of two, the later one counts.
        share: which share of the model's rows it owns, from 0.
        shares: how many there are: one, as long as a model is owned whole.
    """

    process: str
    grpc: str
    http: str
    epoch: int = 0
    share: int = 0
    shares: int = 1
