"""Checks of arguments and names, with uniform error texts."""

import os
import re
import socket
from collections.abc import Iterable

from deltasync.base.errors import InvalidInput


def check_type(call: str, name: str, value: object, *kinds: type, remedy: str = "") -> None:
    """Check the type of an argument of a call, such as `Subscriber(options, target)`."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{call}: {name} is {type_in_words(value)}, expected {expected}{remedy and f': {remedy}'}")


def check_items(call: str, name: str, values: object, kind: type) -> None:
    """Check that an argument is a list of items of one type, see `check_type`."""
    if not isinstance(values, Iterable):
        raise TypeError(f"{call}: {name} is {type_in_words(values)}, expected a list of {kind.__name__}")
    for each in values:
        check_type(call, f"an item of {name}", each, kind)


def type_in_words(value: object) -> str:
    """The type of a value in words, for an error."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return "None" if value is None else f"of type {type(value).__name__}"


def number_of(name: str, value: object) -> float:
    """The value of an argument or a key as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{name} {shown(value)}: expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidInput(f"{name}: the number is too large") from error


def shown(value: object) -> str:
    """The value of an argument for an error. Python refuses to print numbers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "with thousands of digits"


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode a string. JSON and Python allow lone surrogates, halves of characters."""
    return not any(0xD800 <= ord(each) <= 0xDFFF for each in value)


NAME_PATTERN = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(NAME_PATTERN)


def check_name(what: str, name: str) -> str:
    """Return `name` if it is valid for a model, consumer or replica. It is then also a safe file name."""
    if not isinstance(name, str):
        raise TypeError(f"{what} name is {type_in_words(name)}, expected str")
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} name {name!r}: use 1 to 128 letters, digits, '.', '_' or '-', not starting with '.'"
        )
    return name


def guest_name(verb: str) -> str:
    """A name for a command that acts as a replica: its verb, the host and the process id."""
    host = re.sub("[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:64]
    return f"{verb}-{host}-{os.getpid()}"
