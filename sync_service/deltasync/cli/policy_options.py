"""A policy on the command line."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from deltasync.core.errors import InvalidInput
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType

F = TypeVar("F", bound=Callable[..., Any])

_WHICH_OPTIONS = (
    click.option(
        "--tables",
        multiple=True,
        default=["*"],
        metavar="PATTERN",
        help="Tables it follows, by a pattern of their names: *, ?, [...]. May be repeated.",
    ),
    click.option(
        "--mode",
        type=click.Choice([mode.value for mode in Mode]),
        default=Mode.EMBEDDINGS.value,
        help="Send values, or only ids of rows and the norms of what has changed in them.",
    ),
)
_RELEASE_OPTIONS = (
    click.option(
        "--top-k",
        type=float,
        help="Of the rows that have changed, send at once only those that have changed most: this many, or "
        "below 1 this share of them. All unless given.",
    ),
    click.option("--top-k-per-table", is_flag=True, help="Count --top-k in every table by itself."),
    click.option(
        "--max-age",
        type=float,
        metavar="SECONDS",
        help="Send a row that is unsent for longer, however little it has changed. No limit unless given.",
    ),
    click.option(
        "--min-interval", type=float, default=0.0, metavar="SECONDS", help="Time between two releases, at least."
    ),
    click.option(
        "--max-bytes", type=int, help="Ids and values of a release, at most. No limit unless given."
    ),
    click.option(
        "--value-type",
        "--dtype",
        "value_type",
        type=click.Choice([value_type.value for value_type in ValueType]),
        default=ValueType.FP32.value,
        help="What values are sent as.",
    ),
)  # fmt: skip

_RELEASE_NAMES = ("top_k", "top_k_per_table", "max_age", "min_interval", "max_bytes", "value_type")
_KEYS = {"max_age": "max_age_seconds", "min_interval": "min_interval_seconds"}


def policy_options(function: F) -> F:
    """The options that describe a policy; `policy_of` makes one of their values."""
    for option in reversed((*_WHICH_OPTIONS, *_RELEASE_OPTIONS)):
        function = option(function)
    return function


def release_options(function: F) -> F:
    """Those of them that say how much is sent, and when: all but `--tables` and `--mode`."""
    for option in reversed(_RELEASE_OPTIONS):
        function = option(function)
    return function


def policy_of(options: Mapping[str, Any]) -> Policy:
    """The policy that the values of `policy_options` describe."""
    described = {_KEYS.get(name, name): value for name, value in options.items() if value is not None}
    try:
        return Policy.from_dict(described)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error


def take_policy(settings: dict[str, Any]) -> Policy:
    """Take the policy that the values of `release_options` describe out of a command's settings."""
    return policy_of({name: settings.pop(name) for name in _RELEASE_NAMES})
