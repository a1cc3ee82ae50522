"""`deltasync serve`."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from deltasync.base.errors import InvalidInput
from deltasync.base.logs import log_to_stderr
from deltasync.cli.config import CONTEXT, options_of
from deltasync.cli.output import SERVICE, check_needs
from deltasync.service.options import ServiceOptions

if TYPE_CHECKING:
    from deltasync.cli.probe import Probe
    from deltasync.service.consumers import ProbeStatus

check_needs(*SERVICE)


class _Serve(click.Command):
    """Remembers its arguments, to read all settings again on SIGHUP."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj = tuple(args)
        return super().parse_args(ctx, args)


@click.command(cls=_Serve, params=options_of(ServiceOptions), context_settings=CONTEXT)
@click.pass_context
def serve(ctx: click.Context, /, **settings: Any) -> None:
    """Run the sync service until SIGTERM.

    Every option is also an environment variable, DELTASYNC_ plus its name in capitals, and a key of the
    --config file. A flag overrides the environment, and the environment overrides the file.

    The file may also have tables [consumers.NAME], with a model and policy fields, and a table [limits]. The
    service creates these consumers, or gives existing ones this policy. It reads both tables at the start and
    again on SIGHUP. A --limit overrides the table.
    """
    try:
        log_to_stderr(settings["log_format"], settings["log_level"])
        options = ServiceOptions(**settings)
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It would end a process without a handler.
    from deltasync.api import process

    read = None if ctx.default_map is None else partial(_read_again, ctx.obj)
    try:
        asyncio.run(process.serve(options, read, _probe(options)))
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The loop's handler no longer works.


def _read_again(arguments: Sequence[str]) -> ServiceOptions:
    try:
        with serve.make_context("serve", list(arguments)) as ctx:
            return ServiceOptions(**ctx.params)
    except click.UsageError as error:
        raise InvalidInput(error.format_message()) from error


def _probe(options: ServiceOptions) -> "Callable[[str, ProbeStatus], Probe] | None":
    """A function that starts the probe, given the gRPC address and the status to update; None without a probe."""
    every, file = options.probe_seconds, options.probe_endpoint
    if every is None:
        return None
    from deltasync.cli.probe import Probe
    from deltasync.client import Endpoint

    def begin(address: str, status: "ProbeStatus") -> Probe:
        return Probe(lambda: Endpoint.from_file(file) if file else Endpoint(address), every, status)

    return begin
