"""Answers of all processes of a service, whichever of them is asked.

What one process alone has is asked of it, and its answer passed on; lists, and everything on one screen, are those
of all; a stream is of one. A request that is passed on says so, and is passed on no further. It has the rights of
whoever asked: the token goes with it.
"""

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.api.call_errors import error_response
from deltasync.api.event_stream import MEDIA_TYPE
from deltasync.api.tls_options import TlsOptions
from deltasync.core.errors import ServiceUnavailable
from deltasync.core.words import listed
from deltasync.service.service import Service
from deltasync.status.merged import Merge, merge_of
from deltasync.wire.protocol import MISSING_HEADER

PASSED_ON = "deltasync-passed-on"

# Of these it says what it has itself also while it may answer for no model.
_OWN = frozenset({"/status", "/events"})
# What a process has, and that it has nothing of that name.
_ANSWERED = (200, 404)
_SECONDS = 3.0
_MOST_BYTES = 64 << 20
_THREADS = ThreadPoolExecutor(8, thread_name_prefix="peers")


@dataclass(frozen=True)
class Answer:
    """An answer of a process: its status, kind and body."""

    status: int
    kind: str
    body: bytes


class PeersMiddleware:
    """Answers for all processes what one of them is asked."""

    def __init__(self, app: ASGIApp, service: Service, tls: TlsOptions | None = None) -> None:
        self._app, self._service, self._tls = app, service, tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] != "GET" or self._is_for_this_one(scope):
            await self._app(scope, receive, send)
        elif merge := merge_of(scope["path"]):
            await self._merge(merge, scope, receive, send)
        else:
            await self._pass_on(scope, receive, send)

    def _is_for_this_one(self, scope: Scope) -> bool:
        confirmed, headers = self._service.owners.confirmed, Headers(scope=scope)
        alone = confirmed and self._service.hosting is None
        own = scope["path"] in _OWN and (not confirmed or MEDIA_TYPE in headers.get("accept", ""))
        return alone or own or PASSED_ON in headers

    async def _merge(self, merge: Merge, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what this process and all others answer."""
        if not self._service.owners.confirmed:
            error = ServiceUnavailable("this process is not among the others now; try again")
            await error_response(error)(scope, receive, send)
            return
        others = [each for each in self._service.owners.processes() if each.name != self._service.owners.me.name]
        asked = [asyncio.create_task(self._ask(each.http, scope)) for each in others]
        own = await _answer_of(self._app, scope, receive)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if own.status not in _ANSWERED:
            await _response(own)(scope, receive, send)
            return
        found = {each.name: answer for each, answer in zip(others, answers, strict=True)}
        missing = [name for name, each in found.items() if not _has_answered(each)]
        good = [each for each in (own, *found.values()) if isinstance(each, Answer) and each.status == 200]
        response = _response(await asyncio.to_thread(_merged, merge, good, missing) if good else own)
        if missing:
            response.headers[MISSING_HEADER] = listed(missing)
        await response(scope, receive, send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or with what the process answers that has it."""
        own = _Held(send)
        await self._app(scope, receive, own)
        if owner := own.owner:
            try:
                answer = await self._ask(owner, scope)
            except OSError:  # It is gone: who asks comes again, or goes there.
                await own.let_go()
            else:
                await _response(answer)(scope, receive, send)

    async def _ask(self, http: str, scope: Scope) -> Answer:
        query = scope["query_string"].decode("latin-1")
        url = http + scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        token = Headers(scope=scope).get("authorization", "")
        return await asyncio.get_running_loop().run_in_executor(_THREADS, _get, url, token, self._tls)


class _Held:
    """Sends an answer on, but for one that sends who asks to another process: that is held."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._held = list[Message]()
        self.owner = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 307:
            location = MutableHeaders(raw=message["headers"]).get("location", "")
            self.owner = "/".join(location.split("/")[:3])
        if self.owner:
            self._held.append(message)
        else:
            await self._send(message)

    async def let_go(self) -> None:
        """Send what is held."""
        for message in self._held:
            await self._send(message)


def _has_answered(answer: Answer | BaseException) -> bool:
    return isinstance(answer, Answer) and answer.status in _ANSWERED


def _merged(merge: Merge, answers: Sequence[Answer], missing: Sequence[str]) -> Answer:
    body = json.dumps(merge([json.loads(each.body) for each in answers], missing)).encode()
    return Answer(200, answers[0].kind, body)


async def _answer_of(app: ASGIApp, scope: Scope, receive: Receive) -> Answer:
    messages = list[Message]()

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, keep)
    start, *bodies = messages
    kind = MutableHeaders(raw=start["headers"]).get("content-type", "application/json")
    return Answer(start["status"], kind, b"".join(each.get("body", b"") for each in bodies))


def _response(answer: Answer) -> Response:
    return Response(answer.body, answer.status, media_type=answer.kind)


def _get(url: str, token: str, tls: TlsOptions | None) -> Answer:
    context = _context(tls) if tls else None  # Each time: its files may be new ones.
    headers = {PASSED_ON: "1", **({"Authorization": token} if token else {})}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  # of a process of this service
    handlers: Sequence[Any] = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=_SECONDS) as found:
            return Answer(found.status, found.headers.get_content_type(), found.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers.get_content_type(), error.read(_MOST_BYTES))


def _context(tls: TlsOptions) -> ssl.SSLContext:
    """What other processes are asked with: their certificates are of the CA that clients' are of."""
    context = ssl.create_default_context(cafile=str(tls.client_ca) if tls.client_ca else None)
    context.load_cert_chain(tls.cert, tls.key)
    return context
