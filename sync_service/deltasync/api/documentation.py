"""The OpenAPI document of the HTTP API, and a self-contained page that shows it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import TypeAdapter
from starlette.routing import Route

from deltasync.api.errors import OF_ROUTES
from deltasync.wire.errors import http_errors


def documentation_routes(app: FastAPI) -> list[Route]:
    """The routes of an application's OpenAPI document and of the page that shows it.

    Both are built on request, in a thread, as this takes as long as the rest of the service's start.
    """
    document = app.openapi = _documented(app)  # type: ignore[method-assign]

    async def openapi(_request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(document))

    async def docs(_request: Request) -> Response:
        return HTMLResponse(await asyncio.to_thread(lambda: documentation_page(document())))

    return [
        Route("/openapi.json", openapi, include_in_schema=False),
        Route("/docs", docs, include_in_schema=False),
    ]


def _documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    build, lock = app.openapi, threading.Lock()
    built = cache(lambda: document_errors(build()))

    def document() -> dict[str, Any]:
        with lock:
            return built()

    return document


@dataclass(frozen=True)
class ErrorBody:
    """An error: its name, and a message with the problem and the remedy."""

    error: str
    message: str


def document_errors(document: dict[str, Any]) -> dict[str, Any]:
    """Replace FastAPI's errors in an OpenAPI document by ours, which are always JSON.

    They are added here because FastAPI would spend most of the service's start on models for them.
    """
    schemas, errors = document["components"]["schemas"], _errors()
    schemas["ErrorBody"] = TypeAdapter(ErrorBody).json_schema()
    for path in document["paths"].values():
        for operation in path.values():
            responses = operation["responses"]
            responses.pop("422", None)
            own = {status: _as_json(each) if status >= "400" else each for status, each in responses.items()}
            operation["responses"] = dict(sorted((errors | own).items()))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _errors() -> dict[str, Any]:
    """The errors of every route, by status."""
    named = {405: [OF_ROUTES[405]]} | http_errors()
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    return {str(status): {"description": " or ".join(names), "content": body} for status, names in named.items()}


def _as_json(response: dict[str, Any]) -> dict[str, Any]:
    content = response.get("content")
    return response | {"content": {"application/json": next(iter(content.values()))}} if content else response


_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { border-top: 1px solid #8886; padding-top: 1rem; font-size: 1.1rem; font-family: ui-monospace, monospace; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
code { font-family: ui-monospace, monospace; }
nav ul { columns: 18rem; padding-left: 1rem; }
"""


_METHODS = ("get", "put", "post", "delete")


def documentation_page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as HTML."""
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return "".join(
        [
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: HTTP API</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<style>{_STYLE}</style></head>",
            f"<body><main><h1>{title}: HTTP API</h1>{_text(info.get('description', ''))}",
            '<p>For programs: <a href="/openapi.json">openapi.json</a></p>',
            f"<nav aria-label='Routes'><ul>{''.join(_links(document))}</ul></nav>",
            *(_operation(*each) for each in _operations(document)),
            "<h2>Types of answers</h2>",
            *(_schema(name, each) for name, each in document["components"]["schemas"].items()),
            "</main></body></html>",
        ]
    )


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in sorted(document["paths"].items()):
        for method in _METHODS:
            if method in methods:
                yield method.upper(), path, methods[method]


def _links(document: Mapping[str, Any]) -> Iterator[str]:
    for method, path, _ in _operations(document):
        yield f'<li><a href="#{_anchor(method, path)}"><code>{method} {escape(path)}</code></a></li>'


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parameters = "".join(
        _row(each["name"], f"in the {each['in']}", _type(each.get("schema", {})), each.get("description", ""))
        for each in operation.get("parameters", ())
    )
    answers = "".join(
        _row(status, _content(each), "", each.get("description", ""))
        for status, each in operation["responses"].items()
    )
    table = f"<h3>Parameters</h3><table>{parameters}</table>" if parameters else ""
    heading = f'<h2 id="{_anchor(method, path)}">{method} {escape(path)}</h2>'
    sent = f"<h3>Body</h3>{_body(operation['requestBody'])}" if "requestBody" in operation else ""
    return (
        f"{heading}{_text(operation.get('description', ''))}{table}{sent}<h3>Answers</h3><table>{answers}</table>"
    )


def _body(body: Mapping[str, Any]) -> str:
    """Describe the body of a request, with the fields of unnamed schemas."""
    need = "Required." if body.get("required") else "Optional."
    kinds = "".join(f"{_type(each['schema'])}{_fields(each['schema'])}" for each in body["content"].values())
    examples = (escape(json.dumps(each["example"])) for each in body["content"].values() if "example" in each)
    shown = "".join(f"<p>For example <code>{each}</code></p>" for each in examples)
    return f"<p>{escape(need)}</p>{kinds}{shown}"


def _content(answer: Mapping[str, Any]) -> str:
    kinds = answer.get("content", {})
    return ", ".join(_type(each["schema"]) if each.get("schema") else escape(kind) for kind, each in kinds.items())


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    text = _text(schema.get("description", ""))
    return f'<h3 id="schema-{escape(name)}"><code>{escape(name)}</code></h3>{text}{_fields(schema)}'


def _fields(schema: Mapping[str, Any]) -> str:
    rows = "".join(_row(name, _type(each), "", each.get("description", "")) for name, each in _named(schema))
    return f"<table>{rows}</table>" if rows else ""


def _named(schema: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of an object and of its unnamed inner objects."""
    for name, each in schema.get("properties", {}).items():
        yield f"{within}{name}", each
        yield from _named(each, f"{within}{name}.")


def _type(schema: Mapping[str, Any]) -> str:
    """Describe a type, with links to schemas."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if several := schema.get("anyOf"):
        return " or ".join(_type(each) for each in several)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if words := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " or ".join(f"<code>{escape(str(each))}</code>" for each in words)
    if isinstance(values := schema.get("additionalProperties"), Mapping) and values:
        return f"object of {_type(values)} by name"
    return escape(str(schema.get("type", "anything")))


def _row(name: str, *cells: str) -> str:
    """A table row; its cells are HTML, except the last, which is text."""
    *marked, text = cells
    shown = "".join(f"<td>{each}</td>" for each in marked)
    return f"<tr><th scope='row'><code>{escape(name)}</code></th>{shown}<td>{escape(text)}</td></tr>"


def _text(text: str) -> str:
    return "".join(f"<p>{escape(each)}</p>" for each in text.strip().split("\n\n") if each)


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}-{path.strip('/').replace('/', '-').replace('{', '').replace('}', '')}".lower())
