"""How far consumers have been behind, over the last minutes."""

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from deltasync.status.overview import ConsumerOverview

KEPT_SAMPLES = 600


@dataclass(frozen=True)
class LagHistory:
    """A consumer's lag over time, the oldest sample first: `unix_ms` says when each was taken, milliseconds since
    1970. What was not known is null.
    """

    consumer: str
    unix_ms: list[int]
    state: list[str]
    versions: list[int]
    rows: list[int]
    bytes: list[int]
    seconds: list[float]
    unsent_norm: list[float | None]
    unsent_share: list[float | None]
    released_bytes: list[int]


_COLUMNS = ("versions", "rows", "bytes", "seconds", "unsent_norm", "unsent_share", "released_bytes")
_UNKNOWN = -1.0


class LagHistories:
    """The histories of all consumers. Used in the event loop."""

    def __init__(self) -> None:
        self._samples = dict[str, deque[tuple[int, str, "array[float]"]]]()

    def add(self, unix_ms: int, consumers: Iterable[ConsumerOverview]) -> None:
        """Have one more sample, of the consumers that there are now."""
        before, self._samples = self._samples, {}
        for each in consumers:
            kept = self._samples[each.consumer] = before.get(each.consumer) or deque(maxlen=KEPT_SAMPLES)
            known = (getattr(each, name) for name in _COLUMNS)
            numbers = array("d", (_UNKNOWN if value is None else value for value in known))
            kept.append((unix_ms, each.state, numbers))

    def of(self, consumer: str) -> LagHistory:
        """That of a consumer; without a sample if there is none yet."""
        samples = list(self._samples.get(consumer, ()))
        whole = {
            name: [None if (value := numbers[at]) == _UNKNOWN else value for _, _, numbers in samples]
            for at, name in enumerate(_COLUMNS)
        }
        for name in ("versions", "rows", "bytes", "released_bytes"):
            whole[name] = [None if value is None else int(value) for value in whole[name]]
        times, states = [each[0] for each in samples], [each[1] for each in samples]
        return LagHistory(consumer=consumer, unix_ms=times, state=states, **whole)  # type: ignore[arg-type]
