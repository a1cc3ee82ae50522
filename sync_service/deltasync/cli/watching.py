"""Showing something again and again, and what several commands that show something take."""

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from deltasync.cli.asking import Asking
from deltasync.client.endpoint import Endpoint
from deltasync.core.errors import ServiceUnavailable

F = TypeVar("F", bound=Callable[..., Any])
Show = Callable[[Asking], str]

_SECONDS = 1.0


def json_option(command: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the service's JSON answer.")(command)


def watch_option(command: F) -> F:
    """`--watch`."""
    return click.option("--watch", is_flag=True, help="Show it again every second, until Ctrl-C.")(command)


def as_json_text(answer: Any) -> str:
    """An answer as it came, for programs."""
    return json.dumps(answer, indent=2)


def show(what: Show, http: Endpoint, *, watch: bool) -> Asking:
    """Print something, and who had no part in it, once or until Ctrl-C; a service that is away is waited for then.

    Returns:
        What was asked for it last.
    """
    asking = Asking(http)
    if not watch:
        _print(what(asking), asking)
        return asking
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            asking = Asking(http)
            text = _tried(what, asking)
            click.clear()
            _print(text, asking)
            time.sleep(_SECONDS)
    return asking


def _print(text: str, asking: Asking) -> None:
    click.echo(text)
    asking.say_missing()


def _tried(what: Show, asking: Asking) -> str:
    try:
        return what(asking)
    except ServiceUnavailable as error:
        return f"The service does not answer: {error}"
