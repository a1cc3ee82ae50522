"""`deltasync fsck`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.needs import SERVICE, check_needs
from deltasync.cli.other_version import naming_versions
from deltasync.cli.showing import json_lines, waiting_for
from deltasync.cli.text_table import say
from deltasync.client.admin import Admin
from deltasync.client.endpoint import Endpoint
from deltasync.core.errors import DeltasyncError
from deltasync.core.words import counted

check_needs(*SERVICE)

_CLEAN, _DAMAGED, _COULD_NOT_LOOK = 0, 1, 2
Tables = Sequence[dict[str, Any]]


@click.command(context_settings=CONTEXT)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default=False,
    allow_from_autoenv=False,  # There it names the data directory of the service that is asked.
    help="Look at this data directory, of a service that is stopped, instead of asking one. Nothing is changed.",
)
@click.option("--mend", is_flag=True, help="With --data-dir: mend from the log what it has, as a service does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@operator_options(changes=True)
def fsck(data_dir: Path | None, mend: bool, as_json: bool, service: Endpoint) -> None:
    """Look at everything that a service keeps: every row and every stamp; with --data-dir every record of the log
    too.

    A running service mends what it can, and asks the trainer for the rest. The exit status is 0 if nothing is
    damaged, or all was mended; 1 if damage is left; 2 if it could not look.
    """
    if mend and data_dir is None:
        raise click.UsageError("--mend is for a --data-dir: a running service mends by itself")
    try:
        with naming_versions(service):
            found = _found(data_dir, service, mend=mend)
    except DeltasyncError as error:
        say(f"Error: {error}", err=True)
        sys.exit(_COULD_NOT_LOOK)
    if as_json:
        say(*json_lines({"clean": found.clean, **asdict(found)}))
    else:
        _print(found)
    sys.exit(_CLEAN if found.clean else _DAMAGED)


@dataclass(frozen=True)
class _Found:
    """What was found: of tables, and in a data directory what else. Of files that nothing uses, those that are
    `removed` are no more.
    """

    tables: Tables
    problems: Sequence[str] = ()
    unused: Sequence[Path] = ()
    removed: Sequence[Path] = ()
    foreign: Sequence[Path] = ()

    @property
    def clean(self) -> bool:
        """Whether no damage is left."""
        return not self.problems and not any(each["left"] for each in self.tables)


def _found(data_dir: Path | None, service: Endpoint, *, mend: bool) -> _Found:
    if data_dir is None:
        with waiting_for(service):
            return _Found(Admin(service).inspect())
    # Imported only now: a call of a service needs none of it.
    if mend:
        from deltasync.service.mending import mend_data_directory

        mended = mend_data_directory(data_dir)
        tables = [asdict(each) for each in mended.tables]
        return _Found(tables, removed=mended.removed, foreign=mended.foreign)
    from deltasync.service.stored_state import check_data_directory

    found = check_data_directory(data_dir)
    return _Found([asdict(each) for each in found.tables], found.problems, found.unused, foreign=found.foreign)


def _print(found: _Found) -> None:
    for each in found.tables:
        whose = f"consumer {each['consumer']}" if each["consumer"] else f"model {each['model']}"
        say(f"{whose}, table {each['table']}: {counted(each['rows'], 'row')}, {_words(each)}")
    for problem in found.problems:
        say(problem)
    for path in found.unused:
        say(f"{path} is used by nothing, and is removed by the next service")
    for path in found.removed:
        say(f"{path} was used by nothing, and is removed")
    for path in found.foreign:
        say(f"{path} is nothing that a service has made, and is left alone")
    say("nothing is damaged" if found.clean else "damage is left")


def _words(table: dict[str, Any]) -> str:
    kinds = {"damaged": "damaged", "restamped": "with another stamp or digest", "left": "left"}
    found = [f"{table[kind]} {words}" for kind, words in kinds.items() if table[kind]]
    return ", ".join(found or ["all right"]) + (f": {table['reason']}" if table["reason"] else "")
