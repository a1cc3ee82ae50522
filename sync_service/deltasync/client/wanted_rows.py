"""Asking a service which rows it wants again, while there is nothing to publish."""

import logging
from collections.abc import Sequence

import grpc

from deltasync.v1 import publish_pb2, tables_pb2

logger = logging.getLogger(__name__)

# How long a rank that publishes nothing may not know of it.
ASK_SECONDS = 10.0

_WANTED = f"/{publish_pb2.DESCRIPTOR.services_by_name['PublishService'].full_name}/Wanted"


def ask_wanted(channel: grpc.Channel, rank: publish_pb2.PublishOpen) -> Sequence[tables_pb2.WantedRows] | None:
    """The rows that a service wants from a rank, which has introduced itself so. None where it does not answer:
    the next part will find out why.
    """
    request = publish_pb2.WantedRequest(model=rank.model, run=rank.run, rank=rank.rank)
    try:
        # Not by a stub, whose calls crash the process where the channel was closed meanwhile.
        call = channel.unary_unary(
            _WANTED, publish_pb2.WantedRequest.SerializeToString, publish_pb2.WantedResponse.FromString
        )
        wanted: Sequence[tables_pb2.WantedRows] = call(request).wanted
        return wanted
    except (grpc.RpcError, ValueError) as error:  # The latter of such a channel.
        logger.debug("rank %d was not told which rows are wanted: %s", rank.rank, error)
        return None
