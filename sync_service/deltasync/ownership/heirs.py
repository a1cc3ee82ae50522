"""Which process is to have a model that nobody has."""

from collections.abc import Collection, Iterable
from hashlib import blake2b

from deltasync.ownership.member import Member


def ranked(model: str, names: Iterable[str]) -> list[str]:
    """Processes in the order in which they are to have a model (rendezvous hashing): each model has its own order,
    and where a process goes, only its models get another first one.
    """
    return sorted(names, key=lambda name: (_weight(model, name), name), reverse=True)


def heir_of(model: str, members: Collection[Member], wanted: str = "") -> Member | None:
    """The process that is to have a model: the one that is wanted, if it can; None where nobody can."""
    able = {member.name: member for member in members if not member.draining}
    if wanted in able:
        return able[wanted]
    return able[ranked(model, able)[0]] if able else None


def next_after(model: str, name: str, members: Collection[Member]) -> str:
    """Who is to try after a process that cannot have a model; empty where there is no other."""
    able = ranked(model, {member.name for member in members if not member.draining} | {name})
    following = able[(able.index(name) + 1) % len(able)]
    return following if following != name else ""


def _weight(model: str, name: str) -> bytes:
    return blake2b(f"{model}\0{name}".encode(), digest_size=8).digest()
