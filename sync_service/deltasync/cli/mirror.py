"""`deltasync mirror`."""

import contextlib
import socket
import time
from pathlib import Path

import click

from deltasync.base.process import raise_descriptor_limit
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import service_options
from deltasync.cli.output import say
from deltasync.cli.tail import goodbye_on_sigterm
from deltasync.client.endpoint import Endpoint
from deltasync.client.shared.layout import DIRECTORY
from deltasync.client.shared.target import SharedTarget
from deltasync.client.subscriber import Subscriber, SubscriberOptions

_LOOK_SECONDS = 0.5


@click.command(context_settings=CONTEXT)
@click.argument("name")
@click.option("--consumer", required=True, help="Consumer whose rows it keeps.")
@click.option("--replica", default="", show_default="host name and NAME", help="Its name in the consumer's fleet.")
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=DIRECTORY,
    help="Folder in memory that the readers share.",
)
@click.option(
    "--readable-by",
    type=click.Choice(["owner", "group", "all"]),
    default="group",
    help="Who may read it besides this user. Nobody else can write rows.",
)
@click.option("--huge-pages", is_flag=True, help="Ask for huge pages, which a tmpfs with huge=advise has.")
@click.option(
    "--longest-pin",
    type=click.FloatRange(0),
    default=10.0,
    help="Seconds to wait for readers of a whole version. A reader that takes longer gets an error.",
)
@click.option("--checkpoints", default="", metavar="URL", help="Start from a checkpoint in this folder or URL.")
@service_options()
def mirror(
    name: str,
    consumer: str,
    replica: str,
    directory: Path,
    readable_by: str,
    huge_pages: bool,
    longest_pin: float,
    checkpoints: str,
    service: Endpoint,
) -> None:
    """Keep the tables of a consumer in shared memory NAME, for all processes of this host.

    It is one replica, until Ctrl-C or SIGTERM. Other processes read the memory with
    deltasync.client.SharedReader(NAME), or in C with deltasync_shared.h. The memory has two sides, so it takes
    twice the tables. After the command has ended, readers go on with the last version; started again, it continues
    from there. To free the memory, stop it, remove the folder deltasync-NAME in --directory, and end its readers.
    """
    raise_descriptor_limit()  # The memory of each array has a descriptor.
    target = SharedTarget(
        name,
        consumer,
        directory=directory,
        readable_by=readable_by,
        huge_pages=huge_pages,
        longest_pin_seconds=longest_pin,
    )
    with contextlib.closing(target):
        before = target.newest()
        options = SubscriberOptions(
            service=service,
            consumer=consumer,
            replica=replica or f"{socket.gethostname()}-{name}",
            held=before.position,
            checkpoints=checkpoints,
        )
        found = f", which has version {before.version}" if before.version else ""
        say(f"mirror {name} of consumer {consumer} in {directory}{found}", err=True)
        with (
            contextlib.closing(Subscriber(options, target)) as subscriber,
            contextlib.suppress(KeyboardInterrupt),
            goodbye_on_sigterm(),
        ):
            while True:
                target.note_readiness(subscriber.readiness)
                subscriber.check()
                time.sleep(_LOOK_SECONDS)
