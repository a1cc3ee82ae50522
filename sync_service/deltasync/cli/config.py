"""A command's options from its declared settings: flags, then variables, then a TOML file."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from deltasync.base.errors import InvalidInput
from deltasync.base.settings import ReadTable, Setting, settings_in

# Every option NAME is also the environment variable DELTASYNC_NAME.
CONTEXT = {"auto_envvar_prefix": "DELTASYNC", "show_default": True}


def options_of(declared: type) -> list[click.Parameter]:
    """The options for the settings of a dataclass, and `--config FILE` for a file with any of them."""
    settings = settings_in(declared)
    config = click.Option(
        ["--config"],
        type=click.Path(dir_okay=False, path_type=Path),
        callback=partial(_load, {each.name: each for each in settings}),
        is_eager=True,
        expose_value=False,
        show_envvar=True,
        help="TOML file with any of these options as keys, with underscores for hyphens.",
    )
    return [config, *map(_option, settings)]


def _load(settings: Mapping[str, Setting], ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text())
        if unknown := sorted(values.keys() - settings.keys()):
            raise InvalidInput(f"unknown setting {unknown[0]!r}; settings: {', '.join(sorted(settings))}")
        for name in list(values):
            if read := settings[name].read:
                read(values[name], {})  # An error here is one of the file.
                ctx.meta[_table(name)] = values.pop(name)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from error
    ctx.default_map = values


def _table(name: str) -> str:
    return f"{__name__}.{name}"


class _Option(click.Option):
    """An option; a hidden one has no flag, only its variable and its key."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        if not self.hidden:
            super().add_to_parser(parser, ctx)


def _option(each: Setting) -> click.Option:
    values = {"default": each.default, **_type(each)}
    if each.read:
        values = {"multiple": True, "callback": partial(_read, each, each.read)}
    return _Option(
        [each.flag, each.name],
        envvar=each.variable,
        hidden=each.secret,
        metavar=each.metavar,
        help=each.help,
        show_default=each.shown or each.default not in (None, "", ()),
        **values,
    )


def _type(each: Setting) -> dict[str, Any]:
    if each.kind is bool:
        return {"is_flag": True}
    if each.kind is int:
        return {"type": click.IntRange(each.least, each.most)}
    if each.kind is float:
        return {"type": click.FloatRange(each.least, each.most)}
    if each.kind is Path:
        folder = each.metavar == "DIR"
        return {"type": click.Path(file_okay=not folder, dir_okay=folder, path_type=Path)}
    if get_origin(each.kind) is Literal:
        return {"type": click.Choice(get_args(each.kind))}
    return {"type": _listed if get_origin(each.kind) is tuple else str}


def _listed(value: str | Sequence[str]) -> tuple[str, ...]:
    texts = value.split(",") if isinstance(value, str) else value
    return tuple(stripped for each in texts if (stripped := each.strip()))


def _read(
    each: Setting, read: ReadTable, ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> Any:
    flags = dict[str, str]()
    for value in values:
        name, equals, text = value.partition("=")
        if not equals or flags.get(name, text) != text:
            raise click.BadParameter(f"{value!r}: expected {each.metavar}, and each NAME once", ctx, param)
        flags[name] = text
    try:
        return read(ctx.meta.get(_table(each.name), {}), flags)
    except InvalidInput as error:
        raise click.BadParameter(str(error), ctx, param) from error
