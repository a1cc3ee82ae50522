"""What a replica says at its end: the goodbye of one that is not connected, and why one stops."""

import logging
import threading
from dataclasses import replace
from typing import Any

import grpc

from deltasync.client.acks import Requests, say
from deltasync.client.endpoint import Endpoint
from deltasync.core.words import printable
from deltasync.v1 import subscribe_pb2, subscribe_pb2_grpc

logger = logging.getLogger(__name__)


def say_goodbye(endpoint: Endpoint, replica: subscribe_pb2.LeaveRequest, seconds: float) -> None:
    """Tell a service, once and for at most so many seconds, that a replica has ended."""
    with replace(endpoint, timeout_seconds=max(seconds, 0.01)).channel() as channel:
        try:
            subscribe_pb2_grpc.SubscribeServiceStub(channel).Leave(replica)
        except grpc.RpcError as error:
            text = "replica %s of consumer %s has ended, and counts as away, since nobody could be told: %s"
            logger.info(text, replica.replica, replica.consumer, error.details())


def say_why(requests: Requests, call: Any, error: Exception, seconds: float) -> None:
    """Say on a stream why the replica stops, and wait until the service has read it, `seconds` at most."""
    say(requests, subscribe_pb2.Ack(stopped=printable(f"{type(error).__name__}: {error}")))
    requests.put(None)
    ended = threading.Event()
    call.add_done_callback(lambda _: ended.set())
    ended.wait(seconds)
