"""Names of processes, models and consumers as keys of a bucket: one to one."""

from deltasync.core.errors import InvalidInput
from deltasync.core.names import check_name

PROCESS, MODEL, CONSUMER = "process", "model", "consumer"
_KINDS = {PROCESS, MODEL, CONSUMER}

# A key is made of tokens with dots between them, none of them empty; a name may hold dots anywhere but at its
# beginning, and never this:
_DOT = "="


def key_of(kind: str, name: str) -> str:
    """The key of what has a name.

    Raises:
        InvalidInput: it is no name (`check_name`).
    """
    return f"{kind}.{check_name(kind, name).replace('.', _DOT)}"


def name_of(key: str) -> tuple[str, str]:
    """What kind of thing a key is of, and its name.

    Raises:
        InvalidInput: no such key is made here.
    """
    kind, _, token = key.partition(".")
    if kind not in _KINDS or "." in token:
        raise InvalidInput(f"key {key!r}: expected one of {', '.join(sorted(_KINDS))}, a dot, and a name")
    return kind, check_name(kind, token.replace(_DOT, "."))
