"""What a replica says on its stream, after its open."""

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from deltasync.client.assembler import ReleaseAssembler
from deltasync.client.targets import PartialTarget, Target
from deltasync.core.position import Position
from deltasync.core.steady_clock import steady_ns
from deltasync.v1 import subscribe_pb2
from deltasync.wire.messages import checksums_to_message, position_to_message

Requests: TypeAlias = "queue.SimpleQueue[subscribe_pb2.SubscribeRequest | None]"


@dataclass(frozen=True)
class Acks:
    """Acks of what a target holds.

    Attributes:
        target: the target.
    """

    target: Target

    def held(
        self, assembler: ReleaseAssembler, applied: Position | None, checksums: Mapping[str, int]
    ) -> subscribe_pb2.Ack:
        """That the target holds a position, if it holds one, with the checksum of each table that it can tell."""
        target = self.target
        return subscribe_pb2.Ack(
            received_bytes=assembler.received_bytes,
            applied=position_to_message(applied) if applied else None,
            sums=checksums_to_message(assembler.by_slot(checksums)),
            token=steady_ns(),
            unbound=assembler.unbound(target.bound()) if isinstance(target, PartialTarget) else [],
        )


def say(requests: Requests, ack: subscribe_pb2.Ack) -> None:
    """Send an ack."""
    requests.put(subscribe_pb2.SubscribeRequest(ack=ack))


def return_credit(requests: Requests, received_bytes: int) -> None:
    """Say how much was taken, and nothing of what became of it."""
    say(requests, subscribe_pb2.Ack(received_bytes=received_bytes, token=steady_ns()))


def hang_up(requests: Requests) -> None:
    """Say goodbye, and nothing more."""
    say(requests, subscribe_pb2.Ack(goodbye=True))
    requests.put(None)
