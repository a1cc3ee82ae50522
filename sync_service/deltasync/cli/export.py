"""`deltasync export` and `deltasync show`: read a version of a model from its checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.output import check_needs, json_lines, say, size, text_table

check_needs("safetensors", "xxhash")

F = TypeVar("F", bound=Callable[..., Any])


def _version_options(command: F) -> F:
    """`--at` and `--version`."""
    version = click.option(
        "--version",
        "reference",
        default="",
        show_default="the newest checkpoint",
        metavar="V",
        help="Name or number of a kept version, or number of another version with a checkpoint.",
    )
    at = click.option(
        "--at",
        "url",
        required=True,
        metavar="URL",
        help="The checkpoints: the folder `checkpoints` of a data directory, or the URL of `serve --checkpoints`.",
    )
    return at(version(command))


@click.command(context_settings=CONTEXT)
@click.argument("model")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_version_options
def export(model: str, file: Path, url: str, reference: str) -> None:
    """Write all tables of a version of MODEL to FILE, as safetensors, without a service.

    FILE gets one tensor for each table, parameter, buffer and map, under its name. Rows that are deleted or were
    never published are zeros. `deltasync.trainer.load_export` puts them into a trainer's model. An existing FILE
    is replaced once the new one is complete.

    It takes the memory of the model's tables once, and 16 bytes for each row.
    """
    from deltasync.checkpoints.export import export as write
    from deltasync.checkpoints.export import find_version

    exported = write(*find_version(url, model, reference), file)
    tables = counted(len(exported.tables), "table")
    say(
        f"version {exported.position.number} of model {model} is in {file}: {tables}, "
        f"{size(file.stat().st_size)}, after step {exported.step}"
    )


@click.command(context_settings=CONTEXT)
@click.argument("model")
@click.argument("table")
@click.argument("ids", metavar="ROW...", nargs=-1, required=True, type=click.IntRange(0))
@_version_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(model: str, table: str, ids: tuple[int, ...], url: str, reference: str, as_json: bool) -> None:
    """Show the rows ROW... of TABLE as they were in a version of MODEL, without a service.

    \b
    changed  version in which the row last changed, or was deleted
    state    live, deleted, or never published
    values   empty unless live
    """
    from deltasync.checkpoints.export import find_version, read_rows

    rows = list(dict.fromkeys(ids))
    _, stamps, values = read_rows(*find_version(url, model, reference), table, rows)
    lines = [
        {
            "row": row,
            "changed": abs(stamp) or None,
            "state": "live" if stamp > 0 else "deleted" if stamp else "never published",
            # As short as the type allows: 0.1 in float32 is not 0.10000000149.
            "values": [each.item() if each.dtype.kind != "f" else float(str(each)) for each in some] * (stamp > 0),
        }
        for row, stamp, some in zip(rows, stamps.tolist(), values, strict=True)
    ]
    if as_json:
        say(*json_lines(lines))
        return
    titles = ("row", "changed", "state", "values")
    shown = ({**each, "values": " ".join(map(str, each["values"]))} for each in lines)
    say(*text_table(titles, ([each[title] for title in titles] for each in shown)))
