"""Refusing calls of clients that this service does not understand, or that do not understand it."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc.aio

from deltasync.api.call_errors import abort, as_stream
from deltasync.core.delivery import Delivery
from deltasync.core.errors import Contradiction, DeltasyncError
from deltasync.wire.protocol import OURS, TBE_PROTOCOL, Protocols, agree, protocols_from_metadata

# Health checks and reflection have a protocol of their own.
_METHODS = "/deltasync."


def check_known(deliveries: Iterable[Delivery], client: Protocols) -> None:
    """Check that a client knows the types in which it would be sent rows.

    Raises:
        Contradiction: it does not.
    """
    for each in deliveries:
        if each.value_type and each.held_as_sent and client.newest < TBE_PROTOCOL:
            raise Contradiction(
                f"table {each.spec.name!r} is sent in {each.value_type.value}, which clients know from protocol "
                f"{TBE_PROTOCOL} on; this one speaks {client}: update it, or give its consumer another value type"
            )


def protocols_of(context: grpc.aio.ServicerContext[Any, Any]) -> Protocols:
    """What the client of a call understands; the interceptor has let it begin."""
    return protocols_from_metadata(dict(context.invocation_metadata() or ()))


class ProtocolInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call begin only if its client and this service understand each other."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_METHODS):
            return handler
        try:
            _check(dict(handler_call_details.invocation_metadata or ()))
        except DeltasyncError as error:
            return _refusing(handler, error)
        return handler


def _check(metadata: dict[str, str | bytes]) -> None:
    agreed = agree(protocols_from_metadata(metadata), OURS)
    if not agreed.yes:
        raise Contradiction(agreed.reason)


def _refusing(handler: Any, error: DeltasyncError) -> Any:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    # It asks for no message: one that this service cannot read must not be answered in other words.
    return as_stream(handler, refuse)
