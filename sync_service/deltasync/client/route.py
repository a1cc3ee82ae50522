"""Which process of a service a client asks next, where several make it up."""

import random
from typing import Any

from deltasync.client.endpoint import Endpoint
from deltasync.core.errors import DeltasyncError, InvalidInput, NotOwner, ServiceUnavailable

# Processes that name each other are not followed for ever.
_MOST_TURNS = 4
# A model has a new owner after the lease, at the latest.
_LONGEST_SECONDS = 1.0


class Route:
    """The process to ask: one of those that the endpoint names, or the owner that one of them has named.

    An owner that was named is asked with the endpoint's own rights, over the same scheme: with TLS it shows a
    certificate of the same CA. A token is not sent to another machine over plain text unless the endpoint allows
    that. Where an owner may not be asked, the next of the endpoint's own addresses is.

    Attributes:
        endpoint: of the process to ask now.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._all = endpoint.alone()
        random.shuffle(self._all)  # Of many clients, not all ask the same one first.
        self._next, self._turns = 0, 0
        self._moving = self._moves = False  # By what was heard since the last pause, and before that.
        self.endpoint = self._all[0]

    def get_json(self, path: str) -> Any:
        """The JSON answer to an HTTP GET of `path`, of the process that has it; see `Endpoint.ask`."""
        return self.ask("GET", path)

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """The JSON answer to an HTTP request, of the process that has what is asked for; see `Endpoint.ask`."""
        while True:
            try:
                return self.endpoint.ask(method, path, body, patience_seconds)
            except DeltasyncError as error:
                if not self.turn(error):
                    raise

    def answered(self) -> None:
        """Note that the process that was asked is the one to ask."""
        self._turns = 0

    def turn(self, error: DeltasyncError) -> bool:
        """Ask another process, as an error says, if it says so.

        Returns:
            Whether that is to be asked at once; else it is time for a pause.
        """
        self._turns += 1
        self._moving |= isinstance(error, NotOwner)
        if isinstance(error, NotOwner) and (owner := self._owner(error)):
            self.endpoint = owner
            return self._turns <= _MOST_TURNS or self._pause()
        if not isinstance(error, ServiceUnavailable):
            return False
        self._next = (self._next + 1) % len(self._all)
        self.endpoint = self._all[self._next]
        unasked = not isinstance(error, NotOwner) and self._turns < len(self._all)
        return unasked or self._pause()

    def pause(self, seconds: float) -> float:
        """How long to wait, instead of so many seconds, once it is time for a pause: not long where processes have
        just said that another has the model, or is to have it.
        """
        return min(seconds, random.uniform(0.1, 1.0) * _LONGEST_SECONDS) if self._moves else seconds  # noqa: S311

    def _pause(self) -> bool:
        self._turns, self._moves, self._moving = 0, self._moving, False
        return False

    def _owner(self, error: NotOwner) -> Endpoint | None:
        """Where the owner that an error names is asked; None where it names none that may be."""
        if error.owner is None:
            return None
        try:
            return self._all[0].at(error.owner)
        except InvalidInput:
            return None
