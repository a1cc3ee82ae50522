"""Settings by flag, environment variable and TOML file, in that order."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def _load(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is None:
        return None
    try:
        settings = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from error
    known = {option.name for option in ctx.command.params if option.name != param.name}
    if unknown := sorted(settings.keys() - known):
        names = ", ".join(sorted(str(name) for name in known))
        raise click.BadParameter(f"{path}: unknown setting {unknown[0]!r}; settings: {names}", ctx, param)
    ctx.default_map = {**(ctx.default_map or {}), **settings}
    return path


def config_option() -> Callable[[F], F]:
    """The `--config FILE` option: the file's keys are the command's long options, with underscores."""
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        callback=_load,
        is_eager=True,
        expose_value=False,
        show_envvar=True,
        help="TOML file with any of these settings, named as the options are, with underscores.",
    )


# Every option NAME is also the environment variable DELTASYNC_NAME.
CONTEXT = {"auto_envvar_prefix": "DELTASYNC", "show_default": True}
