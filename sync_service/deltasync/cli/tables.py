"""`deltasync models`, `tables`, `rows`, `processes`, `move` and `drain`: what a service has, and who owns it."""

import click

from deltasync.base.errors import NotFound
from deltasync.base.words import counted, listed, utc
from deltasync.cli.config import CONTEXT
from deltasync.cli.endpoint_options import operator_options
from deltasync.cli.output import (
    json_lines,
    json_option,
    print_missing,
    record_table,
    say,
    show,
    text_table,
    waiting_for,
    with_columns,
)
from deltasync.client.admin import Admin, EachProcess
from deltasync.client.endpoint import Endpoint, Route
from deltasync.status.records import ProcessStatus, TableStatus


@click.group()
def tables() -> None:
    """List and delete tables."""


@tables.command("list", context_settings=CONTEXT)
@click.argument("model", default="")
@json_option
@operator_options()
@with_columns(TableStatus)
def list_tables(model: str, service: Endpoint, as_json: bool) -> None:
    """List the tables of MODEL, or of all models."""

    def shown(processes: EachProcess) -> list[str]:
        lines = [each for each in processes.lines("/tables", "model") if model in ("", each["model"])]
        if model and not lines:
            _check_known(model, processes)
        return json_lines(lines) if as_json else record_table(TableStatus, lines)

    show(shown, service)


def _check_known(model: str, processes: EachProcess) -> None:
    names = [each["model"] for each in processes.lines("/models", "model")]
    if model not in names:
        print_missing(processes)
        raise NotFound(f"no model {model!r}; models: {listed(names) or 'none yet'}")


@tables.command("delete", context_settings=CONTEXT)
@click.argument("model")
@click.argument("table")
@operator_options(changes=True)
def delete_table(model: str, table: str, service: Endpoint) -> None:
    """Delete TABLE of MODEL with its rows. Replicas stop receiving it.

    The service refuses this while a connected rank publishes the table. A later run can create it again.
    """
    Admin(service).delete_table(model, table)
    say(f"table {table} of model {model} deleted")


@click.group()
def models() -> None:
    """Delete models, give them up, and roll them back."""


@models.command("rollback", context_settings=CONTEXT)
@click.argument("name")
@click.option("--version", required=True, metavar="VERSION", help="Name or number of a kept version of the model.")
@click.option(
    "--accept-any", is_flag=True, help="Also admit a trainer without a DeltaSync state, with all its rows."
)
@operator_options(changes=True)
def roll_back(name: str, version: str, accept_any: bool, service: Endpoint) -> None:
    """Make the rows of a kept version the newest version of model NAME.

    All consumers get it at once, whatever their policies hold back, except those that follow a kept version or
    another consumer. The running trainer stops with an error. Until the next version, the service admits only
    trainers that go on from that version (`deltasync export`) or an earlier one, and those with
    SyncOptions(start_over=True). The service needs memory for one more copy of the tables meanwhile.
    """
    with waiting_for(service):
        newest = Admin(service).roll_back(name, version, accept_any=accept_any)
    say(f"model {name} is rolled back: version {newest} has the rows of version {version}")


@models.command("delete", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def delete_model(name: str, service: Endpoint) -> None:
    """Delete model NAME with all its data.

    The service refuses this while a rank is connected or a consumer follows the model.
    """
    Admin(service).delete_model(name)
    say(f"model {name} deleted")


@models.command("give-up", context_settings=CONTEXT)
@click.argument("name")
@operator_options(changes=True)
def give_up_model(name: str, service: Endpoint) -> None:
    """Remove the log of model NAME, which cannot be recovered. Its trainer then publishes every row.

    Damage on disk never removes anything by itself, because the next start can read a file that was put right. Use
    this only if nothing else helps; /readyz has the reason. The service refuses it for a recovered model.
    """
    Admin(service).give_up_model(name)
    say(f"model {name} is given up: its trainer publishes every row")


_KEYS = ("model", "table", "rows")


@click.group()
def rows() -> None:
    """Delete rows from trainer, service and replicas."""


@rows.command("delete", context_settings=CONTEXT)
@click.argument("model")
@click.argument("table")
@click.argument("ids", metavar="ID...", type=click.IntRange(min=0), nargs=-1, required=True)
@operator_options(changes=True)
def delete_rows(model: str, table: str, ids: tuple[int, ...], service: Endpoint) -> None:
    """Delete the rows ID... of TABLE in MODEL's trainer, with one of its next cuts, and in all replicas.

    The service repeats the request, even after a restart of service or trainer, until a sealed cut carries the
    delete. If training later looks the row up, it starts as a new row.
    """
    pending = Admin(service).delete_rows(model, table, ids)
    count, reason = pending["rows"], pending["reason"]
    which = f"of table {table} of model {model}"
    say(f"requested the deletion of {counted(count, 'row')} {which}: {reason}")


@rows.command("pending", context_settings=CONTEXT)
@json_option
@operator_options()
def pending_deletes(service: Endpoint, as_json: bool) -> None:
    """List pending deletes: model, table, number of rows, time of the request, and reason for the wait."""

    def shown(processes: EachProcess) -> list[str]:
        lines = processes.lines("/deletes", "model", "asked_unix_ns")
        if as_json:
            return json_lines(lines)
        rows = ((*(each[name] for name in _KEYS), utc(each["asked_unix_ns"]), each["reason"]) for each in lines)
        return text_table((*_KEYS, "asked", "waits for"), rows) if lines else ["no deletes are pending"]

    show(shown, service)


@click.command(context_settings=CONTEXT)
@json_option
@operator_options()
def processes(service: Endpoint, as_json: bool) -> None:
    """List the processes of a service and the models that each owns.

    Others take over the models of a process that is not alive, as it ended without signing off.
    """
    lines = Route(service).ask("GET", "/processes")
    say(*(json_lines(lines) if as_json else record_table(ProcessStatus, lines)))


@click.command(context_settings=CONTEXT)
@click.argument("model")
@click.option("--to", "process", required=True, help="Name of the new owner.")
@operator_options(changes=True)
def move(model: str, process: str, service: Endpoint) -> None:
    """Move MODEL to another process. Its trainer and replicas follow."""
    with waiting_for(service):
        Admin(service).move_model(model, process)
    say(f"model {model} moved to process {process}")


@click.command(context_settings=CONTEXT)
@click.argument("process", default="")
@operator_options(changes=True)
def drain(process: str, service: Endpoint) -> None:
    """Move all models of PROCESS, by default the one that answers, to other processes before you stop it.

    Until its next start, the process takes over no models.
    """
    with waiting_for(service):
        models = Admin(service).drain_process(process)
    say(f"{process or 'the process'} has handed over {listed(models) or 'no model: it had none'}")
