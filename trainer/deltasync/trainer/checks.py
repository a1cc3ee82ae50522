"""Checks of the values that options are made with, and of the formats of what was saved."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from deltasync.base.errors import InvalidInput


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """See that an option is a whole number of at least `least`.

    Raises:
        InvalidInput: it is another number, or none; True and False are none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidInput(f"{name}: {value!r}, expected a whole number of at least {least}")


def check_positive(name: str, value: Any) -> None:
    """See that an option is a number above 0, and finite.

    Raises:
        InvalidInput: it is another number, or none; True and False are none.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise InvalidInput(f"{name}: {value!r}, expected a positive number")


def check_names(name: str, value: Collection[str]) -> None:
    """See that an option is a collection of names; a single string would be taken for its letters.

    Raises:
        InvalidInput: it is a string.
    """
    if isinstance(value, str):
        raise InvalidInput(f"{name}: {value!r}, expected several names, such as [{value!r}]")


def check_format(what: str, found: Any, newest: int) -> None:
    """See that the format in which something was saved is one that this version reads.

    Raises:
        InvalidInput: it is newer than `newest`, or no number of a format.
    """
    check_whole(f"{what}: format", found)
    if found > newest:
        raise InvalidInput(
            f"{what} is of format {found}, this version reads {newest}: update deltasync, or start without it and "
            "publish every row anew"
        )
