"""How long to wait before trying again."""

import random
from collections.abc import Iterator

_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 5.0


def backoff(longest_seconds: float | None = None) -> Iterator[float]:
    """Seconds to wait before each further try: doubling, with so much jitter that of many who begin at the same
    moment few return at the same moment.

    Args:
        longest_seconds: they become no more than this; None is 5 seconds.
    """
    seconds, longest = _FIRST_SECONDS, longest_seconds or _LONGEST_SECONDS
    while True:
        yield seconds * random.uniform(0.1, 1.0)  # noqa: S311  # not for secrets
        seconds = min(2 * seconds, longest)
