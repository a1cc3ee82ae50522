"""Waiting for other ranks: a rank that waits for long says in its log for which."""

import logging
from collections.abc import Callable, Sequence
from itertools import chain, repeat

from deltasync.core.words import counted
from deltasync.trainer.distributed.ranks import this_rank

logger = logging.getLogger(__name__)

# The first line tells of a mistake while somebody still looks; those after it must not fill the log.
_FIRST_SECONDS, _EACH_SECONDS = 10.0, 60.0
_MOST = 8


def wait_aloud(arrived: Callable[[float], bool], what: Callable[[], str]) -> None:
    """Wait for other ranks, and log that after ten seconds, and every minute from then on.

    Args:
        arrived: wait this number of seconds at most; return whether the ranks have come.
        what: name what this rank waits for. Called for each line of the log.
    """
    waited = 0.0
    for seconds in chain([_FIRST_SECONDS], repeat(_EACH_SECONDS)):
        if arrived(seconds):
            return
        waited += seconds
        logger.warning("rank %d has waited %.0f s for %s", this_rank(), waited, what())


def named(ranks: Sequence[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0, 1, 2, 3, 4, 5, 6, 7 and 5 others`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {some([*map(str, ranks)])}"


def some(names: Sequence[str]) -> str:
    """Names as they are ordered, of many the first: `a, b and 390 others`."""
    left = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {counted(left, 'other')}" if left > 0 else "")
