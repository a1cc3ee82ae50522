"""Whether a service probes itself, and with which rights."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deltasync.core.errors import InvalidInput
from deltasync.core.probe_status import ProbeStatus

if TYPE_CHECKING:
    from deltasync.cli.probe import Probe

F = TypeVar("F", bound=Callable[..., Any])

# Half of what the alert DeltasyncProbeFails waits for: it would call a slower probe a failing one.
_MOST_SECONDS = 30.0


def probe_options(command: F) -> F:
    """`--probe-seconds` and `--probe-endpoint`."""
    seconds = click.option(
        "--probe-seconds",
        type=click.FloatRange(0.1, _MOST_SECONDS),
        default=None,
        show_default=False,
        help="Publish a row of a table of its own so often (30 at most), and read it back as a replica.",
    )
    endpoint = click.option(
        "--probe-endpoint",
        type=click.Path(dir_okay=False, path_type=Path),
        default=None,
        show_default=False,
        help="TOML file with what the probe shows of itself, as --endpoint of other commands: with TLS or roles.",
    )
    return endpoint(seconds(command))


def take_probe_options(settings: dict[str, Any], *, guarded: bool) -> "Callable[[str, ProbeStatus], Probe] | None":
    """Take what says whether the service probes itself out of a command's settings; None = it does not.

    Raises:
        InvalidInput: the service is `guarded`, by TLS or roles, and nothing says what the probe shows.
    """
    every, file = settings.pop("probe_seconds"), settings.pop("probe_endpoint")
    if every is None:
        return None
    if guarded and file is None:
        raise InvalidInput("--probe-seconds: with TLS or roles the probe needs rights: see --probe-endpoint")
    from deltasync.cli.probe import Probe
    from deltasync.client import Endpoint

    def begin(address: str, status: ProbeStatus) -> Probe:
        return Probe(lambda: Endpoint.from_file(file) if file else Endpoint(address), every, status)

    return begin
