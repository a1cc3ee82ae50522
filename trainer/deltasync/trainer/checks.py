"""Checks of option values and of saved formats."""

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from deltasync.base.errors import InvalidInput


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Check that an option is a whole number of at least `least`; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise InvalidInput(f"{name}: {value!r}, expected a whole number of at least {least}")


def check_positive(name: str, value: Any) -> None:
    """Check that an option is a positive, finite number; True and False are no numbers."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise InvalidInput(f"{name}: {value!r}, expected a positive number")


def check_names(name: str, value: Collection[str]) -> None:
    """Check that an option is a collection of names, not a string, whose letters would be read as names."""
    if isinstance(value, str):
        raise InvalidInput(f"{name}: {value!r}, expected several names, such as [{value!r}]")


def check_format(what: str, found: Any, newest: int) -> None:
    """Check that this version can read a saved format."""
    check_whole(f"{what}: format", found)
    if found > newest:
        raise InvalidInput(
            f"{what} is of format {found}, this version reads {newest}: update deltasync, or start without it and "
            "publish every row again"
        )
