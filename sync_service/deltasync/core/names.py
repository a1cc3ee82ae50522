"""Names of models, consumers and replicas."""

import os
import re
import socket

from deltasync.core.arguments import described
from deltasync.core.errors import InvalidInput

NAME_PATTERN = "[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(NAME_PATTERN)


def check_name(what: str, name: str) -> str:
    """Return `name` if it may name a model, consumer or replica (it then is a safe file name too).

    Raises:
        TypeError: it is no text.
        InvalidInput: it is empty, longer than 128 characters, or holds others than letters, digits, `._-`.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} name is {described(name)}, expected str")
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what} name {name!r}: use 1 to 128 of letters, digits, '.', '_' and '-', not starting with '.'"
        )
    return name


def guest_name(verb: str) -> str:
    """The name of a replica that a command is while it runs: with its verb, the host and the process."""
    host = re.sub("[^A-Za-z0-9_-]", "-", socket.gethostname().partition(".")[0])[:64]
    return f"{verb}-{host}-{os.getpid()}"
