"""`deltasync backup` and `deltasync restore`."""

from pathlib import Path

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import SERVICE, check_needs, say, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint

check_needs(*SERVICE)

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(context_settings=CONTEXT)
@click.argument("url")
@click.option(
    "--data-dir",
    type=_FOLDER,
    default=None,
    show_default=False,
    allow_from_autoenv=False,  # The variable is meant for `serve`.
    help="Back up this data directory of a stopped service instead of a running one.",
)
@operator_options(changes=True)
def backup(url: str, data_dir: Path | None, service: Endpoint) -> None:
    """Back up a running service to URL: an absolute path of a folder on the service's machine, or object storage,
    s3://BUCKET/PATH. It must be new or empty. With --data-dir, the folder is on this machine.

    Trainers and replicas continue during the backup. It is complete once this command reports it.
    """
    if data_dir is None and "://" not in url and not Path(url).is_absolute():
        raise click.UsageError(
            f"URL {url!r}: give an absolute path on the service's machine; on this machine it would be "
            f"{Path(url).absolute()}"
        )
    if data_dir is None:
        with waiting_for(service):
            made = Admin(service).backup(url)
        files, size = made["files"], made["bytes"]
    else:  # Imported late, because a running service needs none of it here.
        from deltasync.service.backup import back_up_offline

        copied = back_up_offline(data_dir, url)
        files, size = copied.files, copied.bytes
    say(f"backup {url} is complete: {counted(files, 'file')}, {counted(size, 'byte')}")


@click.command(context_settings=CONTEXT)
@click.argument("url")
@click.option("--data-dir", type=_FOLDER, required=True, help="Data directory to create; new or empty.")
def restore(url: str, data_dir: Path) -> None:
    """Create a data directory from a backup, or from the newest checkpoint of each model at the folder or URL of
    `serve --checkpoints`. The command checks every file against its checksums.

    Every model starts a new epoch, so that replicas and trainers with newer versions detect the rollback.
    """
    from deltasync.service import restore as restoring

    made = restoring.restore(url, data_dir)
    models = ", ".join(f"{name} at version {version}" for name, version in made.models.items()) or "no model"
    say(f"restored {data_dir} from {url}: {models}, {counted(made.bytes, 'byte')}", *made.lacking)
