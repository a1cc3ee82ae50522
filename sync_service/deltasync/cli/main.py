"""The `deltasync` command line."""

import io
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

import click

from deltasync.base.errors import DeltasyncError, NotPermitted
from deltasync.base.logs import log_to_stderr
from deltasync.cli.output import say

E = TypeVar("E", bound=BaseException)

_RIGHTS = "identify yourself with DELTASYNC_TOKEN, --token-file or a certificate"
# Characters to show on each side of one that cannot be encoded.
_SHOWN = 40


class _Verbs(click.Group):
    """A group that imports a subcommand only on use, because each needs the packages of its own extra."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # named by click
        return sorted(_verbs())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        verb = _verbs().get(cmd_name)
        return _load(verb) if verb else None


def _verbs() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="deltasync.commands")}


def _load(verb: EntryPoint) -> click.Command:
    try:
        command = verb.load()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("deltasync"):
            raise
        return _unavailable(verb, f"deltasync {verb.name} needs {error.name}")
    if not isinstance(command, click.Command):
        raise TypeError(f"entry point {verb.name} is a {type(command).__name__}, expected a click command")
    return command


def _unavailable(verb: EntryPoint, needs: str) -> click.Command:
    extras = ",".join(verb.extras)
    return click.Command(
        verb.name,
        help=f"Not available: {needs}.",
        callback=lambda: _fail(f"{needs}: pip install 'deltasync[{extras}]', or '.[{extras}]' in a checkout"),
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _fail(message: str) -> None:
    raise click.ClickException(message)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="deltasync")
def cli() -> None:
    """Keep the embedding tables of predictors moments behind the trainer that changes them.

    For completion in bash, zsh or fish: eval "$(_DELTASYNC_COMPLETE=bash_source deltasync)"
    """


def main() -> None:
    """Run the command line; print an expected error as one line, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run()
    except OSError as error:
        if not _is_of_output(error):
            raise
        # The text may still be in the buffer, and Python would fail to write it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"Error: cannot write the output: {error.strerror}", err=True)
        sys.exit(1)


def _is_of_output(error: OSError) -> bool:
    """Whether printing failed. click itself handles a closed pipe, as after `| head`."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is click.echo.__code__


def _run() -> None:
    try:
        log_to_stderr()
        cli()
    except* DeltasyncError as refused:
        for error in _leaves(refused):
            hint = f"; {_RIGHTS}" if isinstance(error, NotPermitted) else ""
            say(f"Error: {error}{hint}", err=True)
        sys.exit(1)
    except* UnicodeEncodeError as unencodable:
        for each in _leaves(unencodable):
            say(f"Error: {_around(each)!r} is not valid UTF-8 and can be neither sent nor stored", err=True)
        sys.exit(1)


def _around(error: UnicodeEncodeError) -> str:
    """The characters that cannot be encoded, with some context."""
    return error.object[max(0, error.start - _SHOWN) : error.end + _SHOWN]


def _leaves(group: BaseExceptionGroup[E]) -> list[E]:
    leaves: list[E] = []
    for error in group.exceptions:
        leaves.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return leaves
