"""Chooses the process of a service to ask: an address of its endpoint, or the owner of a model."""

import random
from typing import Any

from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, ServiceUnavailable
from deltasync.client.endpoint import Endpoint

# Bounds the redirects if processes refer to each other.
_MOST_TURNS = 4
# The longest pause while a model has no owner. It gets one when the last owner's lease ends.
_LONGEST_SECONDS = 1.0


class Route:
    """Chooses the process to ask: one of the endpoint's addresses, or the owner that one of them has named.

    The owner gets the endpoint's credentials, over the same scheme. With TLS its certificate must be from the same
    CA. Without TLS, an owner on another machine gets no token unless the endpoint allows it; the route then asks
    the endpoint's next address.

    Attributes:
        endpoint: the process to ask now.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._all = endpoint.alone()
        random.shuffle(self._all)  # Spreads the load of many clients.
        self._next, self._turns = 0, 0
        # Whether a process has named another owner: since the last pause, and in the round before it.
        self._moving = self._moves = False
        self.endpoint = self._all[0]

    def ask(self, method: str, path: str, body: Any = None, patience_seconds: float | None = None) -> Any:
        """Send an HTTP request to the process that owns the model; see `Endpoint.ask`."""
        while True:
            try:
                return self.endpoint.ask(method, path, body, patience_seconds)
            except DeltasyncError as error:
                if not self.turn(error):
                    raise

    def answered(self) -> None:
        """Record that the process has answered, and stay with it."""
        self._turns = 0

    def turn(self, error: DeltasyncError) -> bool:
        """Choose another process after an error if that can help.

        Returns:
            Whether to ask it at once; otherwise pause first.
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
        """The length of a pause: `seconds`, or less while the model moves to another owner."""
        return min(seconds, random.uniform(0.1, 1.0) * _LONGEST_SECONDS) if self._moves else seconds  # noqa: S311

    def _pause(self) -> bool:
        self._turns, self._moves, self._moving = 0, self._moving, False
        return False

    def _owner(self, error: NotOwner) -> Endpoint | None:
        """The endpoint of the owner that an error names; None without one, or if this client cannot use it."""
        if error.owner is None:
            return None
        try:
            return self._all[0].at(error.owner)
        except InvalidInput:
            return None
