"""The `deltasync` command: verbs of the service, and those that installed extras add."""

import sys
from importlib.metadata import EntryPoint, entry_points

import click

from deltasync.cli.consumers import consumers
from deltasync.cli.lag import lag
from deltasync.cli.serve import serve
from deltasync.core.errors import DeltasyncError
from deltasync.core.process import log_to_stderr


class _Verbs(click.Group):
    """A group that finds further verbs by their entry point, and imports one only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_extra_verbs()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = super().get_command(ctx, cmd_name)
        extra = _extra_verbs().get(cmd_name)
        return known if known or not extra else _load(extra)


def _extra_verbs() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="deltasync.commands")}


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        needs = f"deltasync {entry.name} needs {error.name}"
        return click.Command(
            entry.name,
            help=f"Not available: {needs}.",
            callback=lambda: _fail(f"{needs}: run `make install`, or pip install 'deltasync[trainer]'"),
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )
    if not isinstance(command, click.Command):
        raise TypeError(f"entry point {entry.name} is a {type(command).__name__}, expected a click command")
    return command


def _fail(message: str) -> None:
    raise click.ClickException(message)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="deltasync")
def cli() -> None:
    """Keeps the embedding tables of predictors a moment behind the trainer that is changing them."""


cli.add_command(serve)
cli.add_command(lag)
cli.add_command(consumers)


def main() -> None:
    """Run the command line; an error that was foreseen is one line, not a traceback."""
    log_to_stderr()
    try:
        cli()
    except* DeltasyncError as group:
        for error in _leaves(group):
            click.echo(f"Error: {error}", err=True)
        sys.exit(1)


def _leaves(group: BaseExceptionGroup[DeltasyncError]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
