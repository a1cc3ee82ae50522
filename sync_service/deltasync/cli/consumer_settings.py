"""The consumers that `deltasync serve` is told of, by flags and by its configuration file."""

from typing import Any

import click

from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.errors import InvalidInput


def consumers_of_flags(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[ConsumerOptions, ...]:
    """The consumers of `--consumer NAME=MODEL`, which keep the policy that they have."""
    pairs = [value.split("=", 1) for value in values]
    if wrong := [value for value, pair in zip(values, pairs, strict=True) if len(pair) != 2]:
        raise click.BadParameter(f"{wrong[0]!r}: expected NAME=MODEL")
    return tuple(ConsumerOptions(name, model) for name, model in pairs)


def consumers_of_file(described: Any) -> tuple[ConsumerOptions, ...]:
    """The consumers of the file's tables `[consumers.NAME]`: a model, and the keys of a policy.

    Raises:
        InvalidInput: what is wrong, and of which consumer.
    """
    if not isinstance(described, dict):
        raise InvalidInput("consumers: expected tables [consumers.NAME]")
    return tuple(_consumer(name, each) for name, each in described.items())


def _consumer(name: str, described: Any) -> ConsumerOptions:
    try:
        if not isinstance(described, dict):
            raise InvalidInput("expected a table")
        policy = {key: value for key, value in described.items() if key != "model"}
        return ConsumerOptions.described(name, described.get("model"), policy)
    except InvalidInput as error:
        raise InvalidInput(f"[consumers.{name}]: {error}") from error


def merged(flags: tuple[ConsumerOptions, ...], file: tuple[ConsumerOptions, ...]) -> tuple[ConsumerOptions, ...]:
    """Those of both; of a consumer that both name the file has the policy.

    Raises:
        InvalidInput: they name different models for one consumer.
    """
    models = {each.name: each.model for each in file}
    for each in flags:
        if models.get(each.name, each.model) != each.model:
            raise InvalidInput(
                f"consumer {each.name!r} follows model {each.model!r} by --consumer, but {models[each.name]!r} by "
                f"[consumers.{each.name}] of the --config file"
            )
    return (*(each for each in flags if each.name not in models), *file)
