"""Ids of the runs of one trainer, which begins another when it is resharded, or goes back to a checkpoint.

Their form says that they are of one trainer: one that was taken over from does not get round that by another run.
"""

import re

# What others have chosen as ids is not taken apart: of this form they are none by chance.
_LATER_RUN = re.compile(r"([0-9a-f]{32})\+[1-9][0-9]*")


def later_run_id(first: str, number: int) -> str:
    """The id of a trainer's run that it has begun anew, from the id of its first one (32 hexadecimal digits).

    Args:
        first: that id.
        number: how often it was begun anew.
    """
    return f"{first}+{number}" if number else first


def first_run_id(run: str) -> str:
    """The id of the first run of the trainer whose run has this id."""
    found = _LATER_RUN.fullmatch(run)
    return found[1] if found else run
