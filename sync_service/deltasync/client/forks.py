"""What becomes of clients in a process that was forked from theirs.

A fork copies memory, but neither threads nor gRPC's connections. A subscriber's rows stay as they were at the
fork, and a publisher sends nothing. Both say so in the child, and go on in the parent. gRPC cannot begin anew in
the child of a process that used it, so clients are made after the fork.
"""

import os
from dataclasses import dataclass, field

from deltasync.core.errors import ServiceUnavailable

_connected_in: int | None = None  # The process that opened this library's first channel.


@dataclass(frozen=True)
class Home:
    """The process in which something was made, and works.

    Attributes:
        what: names it in errors.
        process: the process's id.
    """

    what: str
    process: int = field(default_factory=os.getpid)

    @property
    def left(self) -> str:
        """Why it does not work here; empty in the process that made it."""
        if (here := os.getpid()) == self.process:
            return ""
        return (
            f"{self.what} works in process {self.process}, from which this process {here} was forked; "
            "make one here, after the fork"
        )

    def check(self) -> None:
        """Raise ServiceUnavailable in a process that was forked from the one that made it."""
        if left := self.left:
            raise ServiceUnavailable(left)


def note_connecting() -> None:
    """Note that this process opens a channel.

    Raises:
        ServiceUnavailable: as `check_process`.
    """
    global _connected_in
    check_process()
    _connected_in = os.getpid()


def check_process() -> None:
    """Check that this process can open a channel.

    Raises:
        ServiceUnavailable: it was forked from one that has opened one: gRPC would hang, or end the process.
    """
    here = os.getpid()
    if _connected_in not in (None, here):
        raise ServiceUnavailable(
            f"process {here} was forked from process {_connected_in}, which was connected already, and gRPC does "
            "not work in such a process: connect only after the fork, or start processes with 'spawn' or "
            "'forkserver'"
        )
