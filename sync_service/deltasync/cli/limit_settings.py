"""The limits that `deltasync serve` is told of, by flags and by its configuration file."""

from collections.abc import Mapping
from typing import Any

import click

from deltasync.core.errors import InvalidInput
from deltasync.core.limits import LimitOptions


def limits_of_flags(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """The limits of `--limit NAME=NUMBER`, by name."""
    found = dict[str, int]()
    for value in values:
        name, equals, number = value.partition("=")
        if not equals or not number.replace("_", "").isdecimal():
            raise click.BadParameter(f"{value!r}: expected NAME=NUMBER")
        found[name] = int(number)
    try:
        LimitOptions.described(found)
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error
    return found


def limits_of_file(described: Any) -> Mapping[str, int]:
    """The limits of the file's table `[limits]`, by name.

    Raises:
        InvalidInput: one that there is not, or that is no number.
    """
    LimitOptions.described(described)
    found: Mapping[str, int] = described
    return found
