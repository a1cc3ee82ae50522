"""Requests: their paths and bodies, and work that lasts as long as its client waits."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote, unquote_to_bytes

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deltasync.access.rights import need_of_request
from deltasync.base.arguments import is_text
from deltasync.base.errors import InvalidInput, ServiceUnavailable
from deltasync.base.words import listed
from deltasync.core.policy import FIELDS, Policy, PolicyField

# Characters that stay unencoded in a part of a path: RFC 3986, "pchar".
_PLAIN = "-._~!$&'()*+,;=:@"


def encoded_path(scope: Scope) -> str:
    """The path of a request with its names encoded. A decoded name can contain a slash or a line break."""
    return "/".join(quote(unquote_to_bytes(each), safe=_PLAIN) for each in scope["raw_path"].split(b"/"))


class EncodedRoute(APIRoute):
    """A route that matches encoded paths, decodes the names in them, and refuses unknown query parameters."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Whether the route is for a request, and the names in its path."""
        match, inner = super().matches(
            {**scope, "path": encoded_path(scope)} if scope["type"] == "http" else scope
        )
        names = {name: unquote(value) for name, value in inner.get("path_params", {}).items()}
        return match, {**inner, "path_params": names}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        parameters = {each.alias for each in self.dependant.query_params}
        unknown = sorted(Request(scope).query_params.keys() - parameters)
        # Public routes accept any, as monitors and links often add some.
        if unknown and need_of_request(scope["method"], self.path_format).role is not None:
            takes = f"{scope['method']} {self.path_format} takes {listed(parameters) or 'none'}"
            raise InvalidInput(f"unknown query parameter {unknown[0]!r}: {takes}")
        await super().handle(scope, receive, send)


# 100,000 ids of 13 digits take 1.5 MB.
MOST_BYTES = 2 << 20


class BodyMiddleware:
    """Limits bodies, takes them for JSON, and answers HEAD like GET; uvicorn leaves out the body of the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                raise HTTPException(400, f"body: expected at most {MOST_BYTES} bytes")
            return message

        if scope["type"] == "http":
            # `curl -d` names another type.
            headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
            if scope["method"] == "HEAD":
                scope |= {"method": "GET", "is_head": True}
        await self._app(scope, limited, send)


def _text(text: str) -> str:
    if not is_text(text):
        raise ValueError("it has a lone surrogate, half of a character")
    return text


# JSON can escape a lone surrogate, which cannot be stored.
Text = Annotated[str, AfterValidator(_text)]


class Body(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _schema(policy_field: PolicyField) -> dict[str, Any]:
    schema = policy_field.kind.schema
    if policy_field.default is None:
        schema = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}
    return {**schema, "description": policy_field.description, "default": Policy().as_dict()[policy_field.name]}


def _policy(value: Any) -> Policy:
    if not isinstance(value, dict):
        raise InvalidInput("policy: expected an object")
    return Policy.from_dict(value)


PolicyBody = Annotated[
    Policy,
    PlainValidator(_policy),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {each.name: _schema(each) for each in FIELDS},
            "additionalProperties": False,
            "examples": [{"top_k": 0.1, "value_type": "int8"}],
        }
    ),
]


class ConsumerBody(Body):
    """The model of a consumer, and its policy."""

    model: Text = Field(examples=["clicks"])
    policy: PolicyBody = Policy()


class NewConsumerBody(ConsumerBody):
    """A consumer."""

    name: Text = Field(examples=["predictors"])


class PauseBody(Body):
    """The reason of a pause."""

    reason: Text = ""


class ObjectionBody(Body):
    """The reason of an objection."""

    reason: Text = Field(description="What is wrong with the version that it serves.", examples=["its AUC fell"])


class FollowBody(Body):
    """What a consumer follows: a version, or another consumer at a distance."""

    version: Text = Field("", description="Name or number of a kept version, or `live`; with `after`, the first.")
    after: Text | None = Field(None, description="A consumer to follow at a distance.")
    behind_seconds: float = Field(0.0, ge=0, allow_inf_nan=False, description="The distance.")
    on_objection: Text = "stay"


class DeleteBody(Body):
    """Rows to delete."""

    model: Text = Field(examples=["clicks"])
    table: Text = Field(examples=["sparse.embedding_bags.user"])
    ids: list[int] = Field(description="Global row ids, in any order.", examples=[[4711]])


class LevelBody(Body):
    """The lowest level to log, for one logger or all."""

    level: Text = Field(examples=["debug"])
    logger: Text = Field("deltasync", examples=["deltasync.api"])


class BackupBody(Body):
    """The place of a backup."""

    url: Text = Field(
        description="A URL, or the absolute path of a folder on the service's machine; it must be new or empty.",
        examples=["s3://bucket/backups/monday"],
    )


class MoveBody(Body):
    """The new owner of a model."""

    process: Text = Field(examples=["sync-1"])


class DrainBody(Body):
    """The process to drain; by default the one that answers."""

    process: Text = ""


class KeepBody(Body):
    """The name of a version to keep, which lasts until release; may be empty."""

    name: Text = Field("", examples=["before-launch"])


class RollbackBody(Body):
    """The version to roll back to."""

    version: Text = Field(description="Name or number of a kept version.", examples=["before-launch"])
    accept_any: bool = Field(False, description="Also admit trainers without a DeltaSync state.")


T = TypeVar("T")


async def while_wanted(request: Request, draining: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Run the work of a request after reading its body. Cancel it if the client hangs up or `draining` is set."""
    working = asyncio.create_task(work)
    gone, ending = asyncio.create_task(_gone(request)), asyncio.create_task(draining.wait())
    try:
        await asyncio.wait({working, gone, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        left = gone.done()
    finally:
        for each in (working, gone, ending):
            each.cancel()
        await asyncio.gather(working, return_exceptions=True)
    raise ServiceUnavailable("the client hung up" if left else "the service is shutting down; ask again")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
