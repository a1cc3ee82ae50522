"""How much a replica takes at a time."""

from collections.abc import Awaitable

from deltasync.core.errors import InvalidInput
from deltasync.core.signals import Signal


class Credit:
    """Bytes of ids and values that one stream may have under way.

    Attributes:
        budget: so many.
        sent_bytes: what was sent on the stream.
        taken_bytes: what the replica has taken of that, as it has said.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sent_bytes = self.taken_bytes = 0
        self._signal = Signal()

    def allows(self, size: int) -> bool:
        """Whether so many more may be sent. One message may whatever its size, once nothing is under way."""
        outstanding = self.sent_bytes - self.taken_bytes
        return outstanding <= 0 or outstanding + size <= self.budget

    def take_back(self, received_bytes: int) -> bool:
        """Note that the replica has taken so many since the stream began; whether it has taken more.

        Raises:
            InvalidInput: more than were sent.
        """
        if received_bytes > self.sent_bytes:
            raise InvalidInput(f"acked {received_bytes} bytes, only {self.sent_bytes} were sent")
        more = received_bytes > self.taken_bytes
        self.taken_bytes = max(self.taken_bytes, received_bytes)
        self._signal.wake()
        return more

    def returned(self) -> Awaitable[object]:
        """To be awaited: what the replica says next, from this call on."""
        return self._signal.changed()
