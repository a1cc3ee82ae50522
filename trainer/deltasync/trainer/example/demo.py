"""12. `deltasync demo`: a service, a trainer and replicas on loopback, and a comparison at the end."""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deltasync.cli.config import CONTEXT
from deltasync.cli.output import SERVICE, TRAINER, check_needs
from deltasync.client import InvalidInput, Policy, ValueType
from deltasync.trainer.example.options import ModelOptions, StreamOptions, flags
from deltasync.trainer.example.poison import LEAST_EVENTS, PoisonReport, play_poisoned
from deltasync.trainer.example.processes import DemoFailed, Processes
from deltasync.trainer.example.report import Report, build_report
from deltasync.trainer.example.run import IN_SYNC, DemoOptions, DemoRun, Fleet
from deltasync.trainer.example.stream import count_events

check_needs(*TRAINER, *SERVICE)

REPLICAS = ("replica-0", "replica-1")
_SYNTHETIC_EVENTS = 75_000
_POLL_SECONDS = 0.2


def checked(options: DemoOptions) -> DemoOptions:
    """Check options; returns them with an equal number of events for every rank.

    Raises:
        InvalidInput: the options do not fit together, or there are too few events.
    """
    stream, share = options.stream, options.poison_at
    stream.check_ranks(options.ranks)
    events = count_events(stream, options.sizes)
    if events < 2 * stream.batch_size:
        raise InvalidInput(f"{events} events: the demo needs at least two batches of {stream.batch_size}")
    if share is not None and options.policy != Policy():
        raise InvalidInput("--poison-at: leave out --top-k and --dtype")
    if share is not None and events * min(share, 1 - share) < LEAST_EVENTS:
        raise InvalidInput(
            f"--poison-at {share:g} of {events:,} events: expected at least {LEAST_EVENTS:,} before and after it"
        )
    return replace(options, stream=replace(stream, events=events - events % options.ranks))


def run_demo(options: DemoOptions, console: Console) -> Report | PoisonReport:
    """Run the demo, and print and return its report; DemoFailed if rows differ."""
    options = checked(options)
    with demo_folder(console) as folder:
        report: Report | PoisonReport
        if options.poison_at is None:
            play(options, [Fleet("predictors", REPLICAS, options.policy)], folder, console)
            report = build_report(folder, REPLICAS, options)
        else:
            with Processes(folder) as processes:
                report = play_poisoned(options, processes, console)
        report.show(console)
        if report.unequal:
            raise DemoFailed("the replicas' rows differ from those expected")
    return report


@contextmanager
def demo_folder(console: Console) -> Iterator[Path]:
    """A folder for logs and results, which is kept after an error."""
    folder = Path(tempfile.mkdtemp(prefix="deltasync-demo-"))
    try:
        yield folder
    except Exception:
        console.print(f"logs and results: {folder}", highlight=False, soft_wrap=True)
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def play(
    options: DemoOptions, fleets: Sequence[Fleet], folder: Path, console: Console, until: frozenset[str] = IN_SYNC
) -> None:
    """Run a service, a trainer and fleets to the end of the stream, and until the fleets are in a state `until`.

    The processes write their results to `folder`. `options` come from `checked`.
    """
    with Processes(folder) as processes:
        run = DemoRun(options, fleets, processes, console)
        run.start()
        run.begin_stream()
        while processes.running("trainer"):
            run.lags()
            time.sleep(_POLL_SECONDS)
        run.say(f"all {run.steps} steps are trained; waiting until the replicas have them")
        run.wait_for(until)
        if options.hold:
            run.say(f"everything runs until Ctrl-C; see {run.service.http}/")
            with suppress(KeyboardInterrupt):
                signal.pause()
        run.end()


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream", ("data", "events", "events_per_second"))
@flags(ModelOptions, "sizes", ("managed",))
@click.option("--ranks", type=click.IntRange(1), default=2, help="Trainer processes.")
@click.option("--top-k", type=float, help="Only send the rows that changed most: a share below 1, or a number.")
@click.option(
    "--dtype",
    type=click.Choice([each.value for each in ValueType if not each.tbe_bits]),
    default="fp32",
    help="Type of the values that replicas receive.",
)
@click.option(
    "--poison-at",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="After this share of the events, flip the trainer's labels, and roll the model back.",
)
@click.option("--hold", is_flag=True, help="At the end, keep the service and the replicas running until Ctrl-C.")
def demo(stream: StreamOptions, top_k: float | None, dtype: str, **settings: Any) -> None:
    """Run the whole path on loopback: a service, a trainer of two ranks and two replicas of one consumer.

    Every event is scored before the trainer learns from it: by the trainer, by a synced replica, and by a copy of
    the model that is frozen halfway through. At the end the demo compares every row of both replicas with the
    trainer's; with --managed also buffers and the map of raw ids.

    With --poison-at one replica is a canary, which checks its own AUC. The other one follows the canary at a
    distance. Once the canary objects, the demo rolls the model back to the version of the follower, and compares
    the rows of both.
    """
    try:
        policy = Policy(top_k=top_k, value_type=ValueType(dtype))
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    if stream.data == "synthetic" and stream.events is None:
        stream = replace(stream, events=_SYNTHETIC_EVENTS)
    # Exit as with Ctrl-C, so that the processes end too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    run_demo(DemoOptions(stream=stream, policy=policy, **settings), Console())
