"""Where batches come from: iterators that pause, and that fail."""

from collections.abc import Iterable, Iterator
from typing import Any


class Lost(Exception):
    """The connection to where batches come from."""


class Failing(Iterator[Any]):
    """Hands out batches, but at some of their places fails once."""

    def __init__(self, of: Iterable[Any], places: Iterable[int]) -> None:
        self._batches, self._places, self._taken = list(of), set(places), 0

    def __next__(self) -> Any:
        if self._taken in self._places:
            self._places.remove(self._taken)
            raise Lost
        self._taken += 1
        if self._taken > len(self._batches):
            raise StopIteration
        return self._batches[self._taken - 1]


class Paused(Iterator[Any]):
    """Hands out batches as far as they have arrived."""

    def __init__(self, of: Iterable[Any], arrived: int, *, ends: bool) -> None:
        self._batches, self.arrived, self._ends, self.taken = list(of), arrived, ends, 0

    def __next__(self) -> Any:
        if self.taken == self.arrived:
            if self._ends:
                raise StopIteration
            return None
        self.taken += 1
        return self._batches[self.taken - 1]


def despite_losses(pipeline: Any, iterator: Iterator[Any]) -> tuple[list[Any], int]:
    """The outputs, and how many losses there were."""
    outputs, losses = [], 0
    while True:
        try:
            outputs += [pipeline.progress(iterator)]
        except Lost:
            losses += 1
        except StopIteration:
            return outputs, losses
