"""Access checks of gRPC calls and HTTP requests, before their messages or bodies are read."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self
from urllib.parse import unquote

import grpc.aio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.access.limits import Limits, StreamLimits, peer_of
from deltasync.access.rights import Access, Credentials, OpenCall, check, check_name, need_of_call, need_of_request
from deltasync.access.roles import Role
from deltasync.access.tls import names_of_auth_context
from deltasync.api.errors import abort, as_stream, error_response
from deltasync.api.http_server import CERTIFICATE_NAMES
from deltasync.api.requests import encoded_path
from deltasync.base.errors import DeltasyncError, InvalidInput, ServiceFailed
from deltasync.base.events import error_text

logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls by role and limits, and ends them when the role is revoked.

    Calls that require role admin do not count towards the limits.
    """

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._streams = StreamLimits(limits)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Put a check before the handler of a call.

        All handlers become streaming ones: for others gRPC would read the message before the check.
        """
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None:
            return None
        need = need_of_call(method)

        async def checked(_requests: AsyncIterator[Any], context: _Context) -> None:
            with self._access.call(method.rpartition("/")[2], need, _credentials_of_call(context)) as opened:
                await self._answer(handler, opened, context)

        return as_stream(handler, checked)

    async def _answer(self, handler: Any, opened: OpenCall, context: _Context) -> None:
        try:
            check(opened)
            with self._counted(opened):
                await _let_in(handler, _Requests(context, opened), context)
        except DeltasyncError as error:
            await abort(context, error)
        except grpc.aio.BaseError:  # Includes a call aborted by its handler.
            raise
        except Exception as error:
            logger.exception("%s failed", opened.call.name)
            text = "internal error of the service; its log has the details"
            await abort(context, ServiceFailed(text, detail=f": {error_text(error)}"))
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
    """A call's messages, with a check of the model or consumer in the first.

    gRPC's own iterator would keep each message in memory until the next one.
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


def _credentials_of_call(context: _Context) -> Credentials:
    names = names_of_auth_context({key: tuple(value) for key, value in context.auth_context().items()})
    return Credentials.of(dict(context.invocation_metadata() or ()), names, _address(context.peer()))


def _address(peer: str) -> str:
    """The address in gRPC's name of a peer: `127.0.0.1:4711` in `ipv4:127.0.0.1:4711`."""
    return unquote(peer.partition(":")[2] or peer)


class AccessMiddleware:
    """Admits requests by role, and ends them when the role is revoked."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], encoded_path(scope)
        with self._access.call(
            f"{method} {path}", need_of_request(method, path), _credentials_of_request(scope)
        ) as opened:
            try:
                check(opened)
            except DeltasyncError as error:
                await error_response(error)(scope, receive, send)
                return
            await self._answer(opened, scope, receive, send)

    async def _answer(self, opened: OpenCall, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_and_record(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        except asyncio.CancelledError:
            if opened.revoked is None or begun:
                raise
            if task := asyncio.current_task():
                task.uncancel()
            await error_response(opened.revoked)(scope, receive, send)


def _credentials_of_request(scope: Scope) -> Credentials:
    client = scope.get("client")
    names = scope.get("state", {}).get(CERTIFICATE_NAMES, ())
    return Credentials.of(
        Headers(scope=scope), names, f"{client[0]}:{client[1]}" if client else "an unknown address"
    )
