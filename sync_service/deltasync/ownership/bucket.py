"""Where the processes of a service write down who they are and what they own: keys with revisions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deltasync.core.errors import DeltasyncError


@dataclass(frozen=True)
class Entry:
    """What a key holds: empty if it was deleted; and a number that grows with every change in the bucket."""

    key: str
    value: bytes
    revision: int


class Changed(DeltasyncError):
    """A key is not at the revision at which it was to be written; nothing was."""


class Bucket(Protocol):
    """A few thousand small entries, none of them the truth: it may be lost, or be put back to an earlier copy.

    Used in the event loop. Everything raises `ServiceUnavailable` if brokers do not answer in time.
    """

    async def put(self, key: str, value: bytes, revision: int) -> int:
        """Write a key that is at a revision, 0 if it never was written; answers with the new one.

        Raises:
            Changed: it is at another one.
        """

    async def follow(self, seen: Callable[[Entry], None]) -> None:
        """Have `seen` called with all entries, once each, before this returns; from then on with each change.
        None is left out, but at some moment they may end, unsaid. Ends what was followed before, and makes
        a lost bucket anew.
        """

    async def close(self) -> None:
        """Follow it no more."""
