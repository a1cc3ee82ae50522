"""How often to try again."""

import random
from collections.abc import Iterator

_FIRST_SECONDS, _LONGEST_SECONDS = 0.05, 5.0


def backoff() -> Iterator[float]:
    """Seconds to wait before each further try: doubling, with jitter so that a fleet does not return at once."""
    seconds = _FIRST_SECONDS
    while True:
        yield seconds * random.uniform(0.5, 1.0)  # noqa: S311  # not for secrets
        seconds = min(2 * seconds, _LONGEST_SECONDS)
