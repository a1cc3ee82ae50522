"""`deltasync backup` and `deltasync restore`."""

from collections.abc import Mapping
from pathlib import Path

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import SERVICE, check_needs, say, waiting_for
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint

check_needs(*SERVICE)


@click.command(context_settings=CONTEXT)
@click.argument("url")
@operator_options(changes=True)
def backup(url: str, service: Endpoint) -> None:
    """Back up a running service to URL: an absolute path of a folder on the service's machine, or object storage,
    s3://BUCKET/PATH. It must be new or empty.

    Trainers and replicas continue during the backup. It is complete once this command reports it.
    """
    if "://" not in url and not Path(url).is_absolute():
        raise click.UsageError(
            f"URL {url!r}: give an absolute path on the service's machine; on this machine it would be "
            f"{Path(url).absolute()}"
        )
    with waiting_for(service):
        made = Admin(service).backup(url)
    say(f"backup {url} is complete: {_content(made['models'], made['bytes'])}")


def _content(models: Mapping[str, int], size: int) -> str:
    versions = ", ".join(f"{name} at version {version}" for name, version in models.items()) or "no model"
    return f"{versions}, {counted(size, 'byte')}"


@click.command(context_settings=CONTEXT)
@click.argument("url")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Data directory to create; new or empty.",
)
def restore(url: str, data_dir: Path) -> None:
    """Create a data directory from a backup, or from the newest checkpoint of each model at the folder or URL of
    `serve --checkpoints`. The command checks every file against its checksums.

    Every model starts a new epoch, so that replicas and trainers with newer versions detect the rollback.
    """
    from deltasync.service import restore as restoring

    made = restoring.restore(url, data_dir)
    say(f"restored {data_dir} from {url}: {_content(made.models, made.bytes)}", *made.lacking)
