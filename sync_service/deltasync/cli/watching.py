"""Showing something again and again, and what several commands that show something take."""

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from deltasync.core.errors import ServiceUnavailable

F = TypeVar("F", bound=Callable[..., Any])
Show = Callable[[], str]

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


def show(what: Show, *, watch: bool) -> None:
    """Print something, once or until Ctrl-C; a service that is away is waited for then."""
    if not watch:
        click.echo(what())
        return
    try:
        while True:
            text = _tried(what)
            click.clear()
            click.echo(text)
            time.sleep(_SECONDS)
    except KeyboardInterrupt:
        return


def _tried(what: Show) -> str:
    try:
        return what()
    except ServiceUnavailable as error:
        return f"The service does not answer: {error}"
