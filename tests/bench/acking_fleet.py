"""A fleet whose replicas apply nothing: each acknowledges what it is sent, some time later."""

import asyncio
import random
import sys
from typing import Any

import grpc.aio

from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc
from deltasync.wire.messages import position_from_message, position_to_message
from deltasync.wire.protocol import protocol_to_metadata


class AckingReplica:
    """A replica of consumer "bench", on a stream of its own."""

    def __init__(self, stub: "subscribe_pb2_grpc.SubscribeServiceAsyncStub", name: str, seconds: float) -> None:
        self._call: Any = stub.Subscribe(metadata=[protocol_to_metadata()])
        self._name, self._seconds = name, seconds
        self._received_bytes = 0
        self._later = set[asyncio.Task[None]]()
        self.acks = 0
        self.opened = asyncio.Event()

    async def run(self) -> None:
        """Take releases until the stream is cancelled; acknowledge each at any time within so many seconds."""
        opening = subscribe_pb2.SubscribeOpen(consumer="bench", replica=self._name)
        await self._call.write(subscribe_pb2.SubscribeRequest(open=opening))
        async for response in self._call:
            kind = response.WhichOneof("message")
            if kind == "opened":
                self.opened.set()
            elif kind == "chunk":
                self._count(response.chunk.rows)
            elif kind == "release":
                for rows in response.release.rows:
                    self._count(rows)
                self._acknowledge(response.release.end)
            elif kind == "release_end":
                self._acknowledge(response.release_end)

    def end(self) -> None:
        """Send nothing any more."""
        for task in self._later:
            task.cancel()

    def _count(self, rows: Any) -> None:
        self._received_bytes += len(rows.ids) + len(rows.values)

    def _acknowledge(self, end: subscribe_pb2.ReleaseEnd) -> None:
        position = position_to_message(position_from_message(end.position))
        ack = subscribe_pb2.Ack(received_bytes=self._received_bytes, applied=position, sums=end.sums)
        task = asyncio.create_task(self._send(subscribe_pb2.SubscribeRequest(ack=ack)))
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _send(self, request: subscribe_pb2.SubscribeRequest) -> None:
        await asyncio.sleep(random.uniform(0, self._seconds))  # noqa: S311
        await self._call.write(request)
        self.acks += 1


async def acking_fleet(service: str, count: int, seconds: float) -> None:
    """So many replicas; every line is answered with the acknowledgements that they have sent by then."""
    async with grpc.aio.insecure_channel(service) as channel:
        stub = subscribe_pb2_grpc.SubscribeServiceStub(channel)
        replicas = [AckingReplica(stub, str(number), seconds) for number in range(count)]
        running = [asyncio.create_task(each.run()) for each in replicas]
        for each in replicas:
            await each.opened.wait()
        _answer("ready")
        while await asyncio.to_thread(sys.stdin.readline):
            _answer(str(sum(each.acks for each in replicas)))
        for each, task in zip(replicas, running, strict=True):
            each.end()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
