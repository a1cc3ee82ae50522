"""The goodbye of a replica that ends while it is not connected."""

import logging
from dataclasses import replace

import grpc

from deltasync.client.endpoint import Endpoint
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
