"""Where an endpoint's settings come from: arguments, the environment, and one file, in this order."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltasync.core.errors import InvalidInput

_PATHS = ("ca", "cert", "key", "token_file")
# Keys of the file, which are arguments too.
_KEYS = ("address", "http", "server_name", *_PATHS)
# Where each comes from in the environment, the first that is set.
_VARIABLES = {
    "address": "DELTASYNC_SERVICE",
    **{name: f"DELTASYNC_{name.upper()}" for name in ("http", "server_name", "ca", "cert", "key")},
}
# Likewise; of these only one counts.
_TOKENS = (
    ("token", "DELTASYNC_TOKEN"),
    ("token_file", "DELTASYNC_TOKEN_FILE"),
    ("token", "DELTASYNC_ADMIN_TOKEN"),
)
_FILE = "DELTASYNC_ENDPOINT"


def endpoint_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of an `Endpoint`.

    Args:
        given: those that are given; None and empty ones are not. `endpoint` is a path of the file, which else is
            what DELTASYNC_ENDPOINT says.
        environment: variables of the process.

    Raises:
        InvalidInput: the file cannot be read, or has other keys.
    """
    arguments = {name: value for name, value in given.items() if value not in (None, "")}
    file = arguments.pop("endpoint", None) or environment.get(_FILE)
    found: dict[str, Any] = {}
    for source in (file_settings(Path(file)) if file else {}, _variables(environment), arguments):
        if source.keys() & {"token", "token_file"}:  # One is instead of the other.
            found.pop("token", None)
            found.pop("token_file", None)
        found |= source
    return found


def file_settings(path: Path) -> dict[str, Any]:
    """The settings in a TOML file; paths are relative to its folder.

    Raises:
        InvalidInput: it cannot be read, or has other keys or values.
    """
    try:
        settings = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidInput(f"endpoint {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"endpoint {path}: {error}") from error
    if unknown := sorted(settings.keys() - set(_KEYS)):
        raise InvalidInput(f"endpoint {path}: unknown key {unknown[0]!r}; keys: {', '.join(_KEYS)}")
    if wrong := [name for name, value in settings.items() if not isinstance(value, str)]:
        raise InvalidInput(f"endpoint {path}: {wrong[0]}: expected a text")
    return {name: path.parent / value if name in _PATHS else value for name, value in settings.items()}


def _variables(environment: Mapping[str, str]) -> dict[str, Any]:
    found = {name: environment[variable] for name, variable in _VARIABLES.items() if environment.get(variable)}
    tokens = [(name, environment[variable]) for name, variable in _TOKENS if environment.get(variable)]
    return found | dict(tokens[:1])
