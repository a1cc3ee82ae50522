"""`deltasync backup` and `deltasync restore`."""

from pathlib import Path

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.needs import SERVICE, check_needs
from deltasync.cli.showing import waiting_for
from deltasync.cli.text_table import say
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.core.words import counted

check_needs(*SERVICE)

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(context_settings=CONTEXT)
@click.argument("directory", metavar="DIR", type=_FOLDER)
@click.option(
    "--data-dir",
    type=_FOLDER,
    default=None,
    show_default=False,
    allow_from_autoenv=False,  # There it names the data directory of the service that is asked.
    help="Copy this data directory, of a service that is stopped, instead of asking one.",
)
@operator_options(changes=True)
def backup(directory: Path, data_dir: Path | None, service: Endpoint) -> None:
    """Copy all that a running service keeps to DIR: an absolute path on the service's machine, of a folder that is
    new or empty. With --data-dir, DIR is on this machine, and may be relative.

    Trainers and replicas go on meanwhile. It is complete once this says so: backup.json in it is written last.
    """
    if data_dir is None and not directory.is_absolute():
        raise click.UsageError(
            f"DIR {str(directory)!r}: give an absolute path on the service's machine; on this machine it would "
            f"be {directory.absolute()}"
        )
    if data_dir is None:
        with waiting_for(service):
            made = Admin(service).backup(str(directory))
        files, size = made["files"], made["bytes"]
    else:  # Imported only now: a call of a service needs none of it.
        from deltasync.service.offline import back_up_offline

        copied = back_up_offline(data_dir, directory)
        files, size = copied.files, copied.bytes
    say(f"backup {directory} is complete: {counted(files, 'file')}, {counted(size, 'byte')}")


@click.command(context_settings=CONTEXT)
@click.argument("source", metavar="FROM")
@click.option("--data-dir", type=_FOLDER, required=True, help="The data directory to make: new, or empty.")
def restore(source: str, data_dir: Path) -> None:
    """Make a data directory of a backup's folder; or, of a folder or URL that a service's snapshots are in, from
    the newest of each model. All that is read is compared with its checksum.

    It begins a new epoch of every history: replicas and trainers that hold something later are told so.
    """
    from deltasync.service import restore as restoring

    made = restoring.restore(source, data_dir)
    models = ", ".join(f"{name} at version {version}" for name, version in made.models.items()) or "no model"
    say(f"{data_dir} has what {source} has: {models}, {counted(made.bytes, 'byte')}")
