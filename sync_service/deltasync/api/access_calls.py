"""Letting gRPC calls begin, or not: before any of their messages is received."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self
from urllib.parse import unquote

import grpc.aio

from deltasync.api.access import Access, Credentials, OpenCall, check, check_name
from deltasync.api.access_table import need_of_call
from deltasync.api.call_errors import abort, as_stream
from deltasync.api.peer_certificates import names_of_auth_context
from deltasync.api.stream_limits import StreamLimits, peer_of
from deltasync.core.access import Role
from deltasync.core.errors import DeltasyncError, InvalidInput, ServiceFailed
from deltasync.core.events import described
from deltasync.core.limits import Limits

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call begin only if whoever makes it has the role that it needs, and ends it when that is revoked; and
    only if there are not too many. Who administers is not counted.
    """

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._streams = StreamLimits(limits)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, behind a check. gRPC takes each for one of streams: of others it would receive
        the message before it calls them.
        """
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        need = need_of_call(method)

        async def checked(_requests: AsyncIterator[Any], context: _Context) -> None:
            with self._access.call(method.rpartition("/")[2], need, _credentials(context)) as opened:
                await self._answer(handler, opened, context)

        return as_stream(handler, checked)

    async def _answer(self, handler: Any, opened: OpenCall, context: _Context) -> None:
        try:
            check(opened)
            with self._counted(opened):
                await _let_in(handler, _Requests(context, opened), context)
        except DeltasyncError as error:
            await abort(context, error)
        except grpc.aio.BaseError:  # Among them that the call was aborted, above or by its handler.
            raise
        except Exception as error:
            logger.exception("%s has failed", opened.call.name)
            text = "the service met an error of its own, which its log tells"
            await abort(context, ServiceFailed(text, detail=f": {described(error)}"))
        except asyncio.CancelledError:
            if opened.revoked is None:
                raise
            if task := asyncio.current_task():
                task.uncancel()
            await abort(context, opened.revoked)

    def _counted(self, opened: OpenCall) -> AbstractContextManager[None]:
        if opened.need.role is Role.ADMIN:
            return nullcontext()
        identity = opened.call.identity
        return self._streams.taking(peer_of(identity), without_role=not identity.grants)


async def _let_in(handler: Any, requests: "_Requests", context: _Context) -> None:
    if handler.unary_unary:
        await context.write(await handler.unary_unary(await _only(requests), context))
    elif handler.unary_stream:
        await handler.unary_stream(await _only(requests), context)
    elif inspect.isasyncgenfunction(handler.stream_stream):
        async for response in handler.stream_stream(requests, context):
            await context.write(response)
    else:
        await handler.stream_stream(requests, context)


async def _only(requests: "_Requests") -> Any:
    request = await anext(requests, None)
    if request is None:
        raise InvalidInput("the call has no message")
    return request


class _Requests:
    """A call's messages, the first of which says what its role is needed for. gRPC's own iterator would keep each
    until the next one has come.
    """

    def __init__(self, context: _Context, opened: OpenCall) -> None:
        self._context = context
        self._opened, self._first = opened, True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        if self._first:
            self._first = False
            check_name(self._opened, request)
        return request


def _credentials(context: _Context) -> Credentials:
    names = names_of_auth_context({key: tuple(value) for key, value in context.auth_context().items()})
    return Credentials.of(dict(context.invocation_metadata() or ()), names, _address(context.peer()))


def _address(peer: str) -> str:
    """The address of what gRPC calls a peer: `127.0.0.1:4711` of `ipv4:127.0.0.1:4711`."""
    return unquote(peer.partition(":")[2] or peer)
