"""A read that was launched, and may not have arrived in host memory yet."""

from collections.abc import Callable
from functools import cached_property

import torch

from deltasync.trainer.tracking.delta import Delta


class PendingDelta:
    """What `Tracker.begin_delta` returns. By one thread at a time."""

    def __init__(self, arrival: torch.cuda.Event | None, finish: Callable[[], Delta]) -> None:
        """One of which `finish` makes a delta after its `arrival`; None = it has arrived."""
        self._arrival, self._finish = arrival, finish

    @property
    def arrived(self) -> bool:
        """Whether `result` need not wait. Asking waits for nothing."""
        return self._arrival is None or bool(self._arrival.query())  # type: ignore[no-untyped-call]

    @cached_property
    def result(self) -> Delta:
        """The delta; waits until it has arrived."""
        if self._arrival:
            self._arrival.synchronize()
        return self._finish()

    def then(self, function: Callable[[Delta], Delta]) -> "PendingDelta":
        """The same, with a function applied to the delta."""
        return PendingDelta(self._arrival, lambda: function(self._finish()))
