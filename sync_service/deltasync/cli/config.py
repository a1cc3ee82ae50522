"""Settings from flags, environment variables and a TOML file, in that order."""

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from deltasync.base.errors import InvalidInput

_FILE = f"{__name__} file"
F = TypeVar("F", bound=Callable[..., Any])
Reader = Callable[[Any], object]


def _load(readers: Mapping[str, Reader], ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        settings = _settings(path, ctx, param, readers)
        for key in readers.keys() & settings.keys():
            ctx.meta[_meta_key(key)] = readers[key](settings.pop(key))
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from error
    ctx.default_map = {**(ctx.default_map or {}), **settings}
    ctx.meta[_FILE] = partial(_read_again, readers, ctx, param, path)


def _read_again(
    readers: Mapping[str, Reader], ctx: click.Context, param: click.Parameter, path: Path, key: str, default: Any
) -> Any:
    try:
        settings = _settings(path, ctx, param, readers)
        return readers[key](settings[key]) if key in settings else default
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}") from error


def _settings(
    path: Path, ctx: click.Context, param: click.Parameter, readers: Mapping[str, Reader]
) -> dict[str, Any]:
    settings = tomllib.loads(path.read_text())
    names = {option.name for option in ctx.command.params if option.name != param.name} | readers.keys()
    if unknown := sorted(settings.keys() - names):
        listing = ", ".join(sorted(str(name) for name in names))
        raise InvalidInput(f"unknown setting {unknown[0]!r}; settings: {listing}")
    return settings


def config_option(**readers: Reader) -> Callable[[F], F]:
    """The `--config FILE` option: the file's keys are the command's long options, with underscores.

    Args:
        readers: further keys, each with a function that parses its value or raises `InvalidInput`; see
            `from_config`.
    """
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=partial(_load, readers),
        is_eager=True,
        expose_value=False,
        show_envvar=True,
        help="TOML file with any of these options as keys, with underscores for hyphens.",
    )


def from_config(key: str, default: Any) -> Any:
    """The parsed value of a further key of the `--config` file."""
    return click.get_current_context().meta.get(_meta_key(key), default)


def reader_of_config() -> Callable[[str, Any], Any] | None:
    """A function like `from_config` that reads the file again; None without a file.

    It blocks, and raises `InvalidInput` if the file is wrong.
    """
    reader: Callable[[str, Any], Any] | None = click.get_current_context().meta.get(_FILE)
    return reader


def _meta_key(key: str) -> str:
    return f"{__name__}.{key}"


# Every option NAME is also the environment variable DELTASYNC_NAME.
CONTEXT = {"auto_envvar_prefix": "DELTASYNC", "show_default": True}
