"""The consumers of a configuration file: tables `[consumers.NAME]` with a model and the keys of a policy."""

from typing import Any

from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.errors import InvalidInput
from deltasync.core.names import check_name
from deltasync.core.policy import Policy


def read_consumers(described: Any) -> tuple[ConsumerOptions, ...]:
    """The consumers that TOML describes.

    Raises:
        InvalidInput: what is wrong, and of which consumer.
    """
    if not isinstance(described, dict):
        raise InvalidInput("consumers: expected tables [consumers.NAME]")
    return tuple(_consumer(name, each) for name, each in described.items())


def _consumer(name: str, described: Any) -> ConsumerOptions:
    try:
        return _options(check_name("consumer", name), described)
    except InvalidInput as error:
        raise InvalidInput(f"[consumers.{name}]: {error}") from error


def _options(name: str, described: Any) -> ConsumerOptions:
    if not isinstance(described, dict):
        raise InvalidInput("expected a table")
    policy = {key: value for key, value in described.items() if key != "model"}
    model = described.get("model")
    if not isinstance(model, str):
        raise InvalidInput('expected the name of a model: model = "NAME"')
    return ConsumerOptions(name, check_name("model", model), Policy.from_dict(policy))
