"""A policy on the command line."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from deltasync.core.errors import InvalidInput
from deltasync.core.policy import FIELDS, Policy
from deltasync.core.policy_fields import Amount, Bytes, Flag, Kind, OneOf, Patterns, PolicyField

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULT = Policy().as_dict()


def _parameter(field: PolicyField) -> str:
    """What a field is called among a command's parameters, and in the environment."""
    return field.flags[0].removeprefix("--").replace("-", "_")


def _option(field: PolicyField) -> Callable[[F], F]:
    words = field.words.replace("`", "")
    return click.option(
        *field.flags,
        _parameter(field),
        default=_DEFAULT[field.name],
        metavar=field.kind.metavar,
        help=f"{words} May be repeated." if isinstance(field.kind, Patterns) else words,
        **_type(field.kind),
    )


def _type(kind: Kind) -> dict[str, Any]:
    match kind:
        case OneOf():
            return {"type": click.Choice(kind.names)}
        case Patterns():
            return {"multiple": True}
        case Flag():
            return {"is_flag": True}
        case Bytes():
            return {"type": int}
        case Amount():
            return {"type": _AmountParameter()}
    return {"type": float}


class _AmountParameter(click.ParamType[float]):
    """A number, whole if it is written without a point."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType`."""
        try:
            return int(value)
        except ValueError:
            return click.FLOAT.convert(value, param, ctx)


def policy_options(function: F) -> F:
    """The options that describe a policy; `policy_of` makes one of their values."""
    for field in reversed(FIELDS):
        function = _option(field)(function)
    return function


def policy_of(options: Mapping[str, Any]) -> Policy:
    """The policy that the values of `policy_options` describe."""
    names = {_parameter(field): field.name for field in FIELDS}
    described = {names[name]: value for name, value in options.items() if value is not None}
    try:
        return Policy.from_dict(described)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
