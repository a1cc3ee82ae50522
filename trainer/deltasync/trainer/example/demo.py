"""`deltasync demo`: a service, a trainer and replicas as processes on loopback, and a comparison at the end."""

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deltasync.base.words import counted
from deltasync.cli.config import CONTEXT
from deltasync.cli.output import SERVICE, TRAINER, check_needs
from deltasync.client import Admin, InvalidInput, Policy, ServiceUnavailable, ValueType
from deltasync.client.admin import fetch_lag
from deltasync.trainer.example.options import ModelOptions, StreamOptions, TrainingOptions, arguments, flags
from deltasync.trainer.example.processes import (
    ADMIN,
    STATUS,
    DemoFailed,
    DemoService,
    ProcessCredentials,
    Processes,
)
from deltasync.trainer.example.stream import count_events

check_needs(*TRAINER, *SERVICE)

MODEL = "clicks"
# States in which all replicas of a fleet have every row of the model, or every release.
IN_SYNC = frozenset({"in sync"})
CURRENT = frozenset({"in sync", "current"})
_SYNTHETIC_EVENTS = 75_000
_WORKERS = 4
# Many processes import PyTorch before they are ready, perhaps on few cores.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS, _HEAD_START_SECONDS = 0.2, 0.5
# With --poison-at, live replicas wait if their rows lack more batches than this. Items change slowly, because the
# rows of the followers are older.
_MOST_BEHIND, _DRIFT = 8, 0.3
# Events of the stream before and after the labels are flipped: enough to learn, and for AUC to fall and come back.
_LEAST_EVENTS = 12_000


@dataclass(frozen=True)
class Fleet:
    """A consumer and its replicas, whose names are unique among all fleets.

    The first replica of a fleet with `workers` is a mirror, over which that number of predictor processes answers.
    The replicas of a `frozen` fleet are predictors that apply no release in the second half. The demo does not
    wait for them at the end. `arguments` are further arguments of the replicas.
    """

    consumer: str
    replicas: tuple[str, ...]
    policy: Policy
    frozen: bool = False
    workers: int = 0
    arguments: tuple[str, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether its replicas answer over HTTP from quantised tables, instead of scoring in their own process."""
        return self.policy.value_type.tbe_bits is not None


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of the demo. The command's help explains them."""

    stream: StreamOptions
    sizes: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    ranks: int = 2
    publish_every: int = 2
    policy: Policy = field(default_factory=Policy)
    workers: int = 0
    secure: bool = False
    hold: bool = False
    poison_at: float | None = None

    @property
    def fleets(self) -> list[Fleet]:
        """The fleets to run. The demo compares the first one with the trainer, unless it poisons the model."""
        if self.poison_at is not None:
            live = ("--most-behind", str(_MOST_BEHIND))
            return [
                Fleet("predictors", ("replica-0", "replica-1"), self.policy, arguments=live),
                Fleet("canary", ("replica-canary",), self.policy, arguments=(*live, "--object-below", "0.85")),
                Fleet("followers", ("replica-follower",), self.policy),
            ]
        synced = Fleet("predictors", ("replica-0", "replica-1"), self.policy, workers=self.workers)
        if not synced.serves:
            return [synced]
        frozen = Fleet("frozen", ("replica-1",), self.policy, frozen=True)
        return [replace(synced, replicas=("replica-0",)), frozen]


def checked(options: DemoOptions) -> DemoOptions:
    """Check options; returns them with an equal number of events for every rank.

    Raises:
        InvalidInput: the options do not fit together, or there are too few events.
    """
    stream, training = options.stream, options.training
    training.check_shares(stream.batch_size, options.ranks)
    if options.sizes.managed and training.input == "tensordict":
        raise InvalidInput("--input tensordict: managed collision takes KeyedJaggedTensors only")
    events = count_events(stream, options.sizes)
    if events < 2 * stream.batch_size:
        raise InvalidInput(f"{events} events: the demo needs at least two batches of {stream.batch_size}")
    if (share := options.poison_at) is not None:
        if options.policy != Policy():
            raise InvalidInput("--poison-at: leave out --serve, --top-k and --dtype")
        if events * min(share, 1 - share) < _LEAST_EVENTS:
            raise InvalidInput(
                f"--poison-at {share:g} of {events:,} events: at least {_LEAST_EVENTS:,} must come before, and "
                "as many after"
            )
        stream = replace(stream, drift=_DRIFT)
    return replace(options, stream=replace(stream, events=events - events % options.ranks))


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo and return its report. Keeps the folder of logs and results if something failed or differs."""
    from deltasync.trainer.example.poison import play_poisoned
    from deltasync.trainer.example.report import all_equal, build_report

    options = checked(options)
    folder, keep = Path(tempfile.mkdtemp(prefix="deltasync-demo-")), True
    try:
        if options.poison_at is None:
            play(options, options.fleets, folder, console)
            report = build_report(folder, options)
        else:
            report = play_poisoned(options, folder, console)
        keep = not all_equal(report)
    except (KeyboardInterrupt, SystemExit):
        keep = False
        raise
    finally:
        if keep:
            console.print(f"logs and results: {folder}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(folder)
    return report


def play(
    options: DemoOptions, fleets: Sequence[Fleet], folder: Path, console: Console, until: frozenset[str] = IN_SYNC
) -> None:
    """Run a service, a trainer and fleets to the end of the stream, and until the fleets are in a state `until`.

    The processes write their results to `folder`. The last replica of the last fleet also scores with a copy that
    is frozen halfway through, or is itself frozen then. `options` come from `checked`.
    """
    with Processes(folder) as processes:
        run = DemoRun(options, fleets, folder, console, processes)
        run.start_service()
        run.start_others()
        run.wait_for(IN_SYNC)
        run.begin_stream()
        run.watch_trainer()
        lacking = "row" if until == IN_SYNC else "release"
        run.say(f"all {run.steps} steps are trained; waiting until the replicas have every {lacking}")
        run.show(run.wait_for(until))
        run.end()
        run.say("comparing the replicas' rows with the trainer's")


class DemoRun:
    """One run of the processes.

    Attributes:
        fleets: the fleets.
        steps: the number of steps of the whole stream.
        replicas: the names of all replicas.
        admin: the operator's connection to the service.
        watched: the processes that must not fail.
    """

    def __init__(
        self, options: DemoOptions, fleets: Sequence[Fleet], folder: Path, console: Console, processes: Processes
    ) -> None:
        self._options, self.fleets, self._console, self._processes = options, fleets, console, processes
        self._stream = replace(options.stream, start_file=folder / "start")
        self.steps = -(-(self._stream.events or 0) // self._stream.batch_size)
        self._lines = 0
        self.replicas = [name for fleet in fleets for name in fleet.replicas]
        self.watched = ["trainer", *self.replicas, "service"]
        # An objection also needs role read.
        more = "" if options.poison_at is None else " read"
        roles = {name: f"subscribe:{fleet.consumer}{more}" for fleet in fleets for name in fleet.replicas}
        self._credentials = ProcessCredentials(
            folder, {"trainer": f"publish:{MODEL}", **roles}, secure=options.secure
        )

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def start_service(self, *arguments: str) -> None:
        """Start the service with further arguments, and create the consumers."""
        self.say("starting the service; the first time, compiling its kernels takes half a minute or more")
        service, secure = (
            DemoService(self._processes, [*self._credentials.service_arguments, *arguments]),
            self._options.secure,
        )
        self._http = service.http
        self._credentials.write(service)
        self.admin = Admin(self._credentials.endpoint(ADMIN))
        for fleet in self.fleets:
            self.admin.create_consumer(fleet.consumer, MODEL, fleet.policy)
        name = self.fleets[0].consumer
        self.say(f"service: pid {service.pid}, gRPC on {service.grpc}; while it runs, try")
        lag = f"deltasync lag {name} --endpoint {self._credentials.file(STATUS)}"
        self.say(f"  {lag if secure else f'curl {service.http}/consumers/{name}'}")
        self.say(f"  {service.http}/ in a browser{', with the token' if secure else ''}")

    def start_others(self) -> None:
        """Start the trainer and the replicas, which wait for the stream."""
        self.say("starting the trainer and the replicas, and waiting until the replicas have the first model")
        options, start = self._options, self._processes.start
        shared = [*arguments(self._stream, options.sizes), "--results", str(self._processes.folder)]
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "-m"]
        publish = ["--model", MODEL, "--publish-every", str(options.publish_every), *arguments(options.training)]
        publish += ["--endpoint", str(self._credentials.file("trainer"))]
        if self.poisoned_from is not None:
            publish += ["--poison-at", str(self.poisoned_from), "--on-refusal", "raise"]
        start("trainer", [*torchrun, "deltasync.trainer.example.train", *publish, *shared])
        for fleet in self.fleets:
            for name in fleet.replicas:
                follow = ["--consumer", fleet.consumer, "--replica", name, *fleet.arguments]
                follow += ["--endpoint", str(self._credentials.file(name))]
                if fleet.workers and name == fleet.replicas[0]:
                    follow += ["--workers", str(fleet.workers)]
                if fleet.serves:
                    follow += ["--value-type", fleet.policy.value_type.value]
                scores_twice = not fleet.serves and self.poisoned_from is None and name == self.replicas[-1]
                if fleet.frozen or scores_twice:
                    follow += ["--freeze-at", str((self._stream.events or 0) // 2)]
                start(name, ["deltasync.trainer.example.replica", *follow, *shared])

    @property
    def poisoned_from(self) -> int | None:
        """The event from which on labels are flipped; None = never."""
        share = self._options.poison_at
        return None if share is None else int(share * (self._stream.events or 0))

    def begin_stream(self) -> None:
        """Let the first event arrive in a moment."""
        file = self._processes.folder / "start.new"
        file.write_text(str(time.time() + _HEAD_START_SECONDS))
        file.rename(file.with_name("start"))

    def lags(self) -> dict[str, dict[str, Any]]:
        """The lag of each consumer; empty while the service does not answer. DemoFailed if a process failed."""
        for name in self.watched:
            self._processes.running(name)
        try:
            status = self._credentials.endpoint(STATUS)
            return {fleet.consumer: fetch_lag(status, fleet.consumer) for fleet in self.fleets}
        except ServiceUnavailable:
            return {}

    def wait_for(self, states: frozenset[str]) -> dict[str, Any]:
        """Wait until all fleets are complete and in one of these states; returns the lag of the first fleet."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            lags = self.lags()
            pairs = [(lags[fleet.consumer], fleet) for fleet in self.fleets] if lags else []
            lacking = [words for pair in pairs if (words := _lacks(*pair, states))]
            if lags and not lacking:
                return lags[self.fleets[0].consumer]
            if time.monotonic() > deadline:
                why = "; ".join(lacking) or "the service does not answer"
                raise DemoFailed(f"the replicas did not get the model within {_PATIENCE_SECONDS:.0f} s: {why}")
            time.sleep(_POLL_SECONDS)

    def watch_trainer(self) -> None:
        """Show the trainer's progress until it ends."""
        while self._processes.running("trainer"):
            if lags := self.lags():
                self.show(lags[self.fleets[0].consumer])
            time.sleep(_POLL_SECONDS)

    def show(self, lag: dict[str, Any]) -> None:
        """Print a line for each tenth of the steps."""
        if (part := lag["head_step"] * 10 // self.steps) > self._lines:
            self._lines, behind = part, lag["lag"]
            far = f"{counted(behind['versions'], 'version')}, {counted(behind['rows'], 'row')}"
            unsent = f", {100 * share:.1f} % of the norm unsent" if (share := behind["unsent_share"]) else ""
            head = f"step {lag['head_step']}/{self.steps}  version {lag['head']}"
            self.say(f"{head}  lag {far}, {behind['seconds']:.1f} s{unsent}")

    def end(self) -> None:
        """Stop the replicas and the service; with --hold only after Ctrl-C."""
        if self._options.hold:
            self._hold()
        self.say("stopping the replicas and the service")
        for name in self.replicas:
            self._processes.stop(name)
        if self._processes.status("service") is None:  # With --hold the user may have killed it.
            self._processes.stop("service")

    def _hold(self) -> None:
        """Wait for Ctrl-C. Only report processes that end, because the user may break them on purpose."""
        self.say(f"the trainer has ended; everything else runs until Ctrl-C; see {self._http}/")
        self.say("  then the demo compares the replicas' rows with the trainer's, and prints the AUCs")
        running = [*self.replicas, "service"]
        pids = ", ".join(f"{name} {self._processes.pid(name)}" for name in running)
        self.say(f"  processes to stop or kill, by pid: {pids}")
        with suppress(KeyboardInterrupt):
            while True:
                for name in list(running):
                    if (status := self._processes.status(name)) is not None:
                        running.remove(name)
                        self.say(f"{name} has ended (status {status})")
                time.sleep(_POLL_SECONDS)


def _lacks(lag: dict[str, Any], fleet: Fleet, states: frozenset[str]) -> str:
    """Why a fleet is not complete or not in one of the states; empty if it is, or does not need to be."""
    complete = len(lag["replicas"]) == len(fleet.replicas)
    in_state = bool(lag["head"]) and complete and lag["state"] in states and not lag["lag"]["versions"]
    if in_state or (fleet.frozen and lag["head_step"]):  # Only wait for a frozen fleet before training starts.
        return ""
    there = f"{len(lag['replicas'])} of {counted(len(fleet.replicas), 'replica')}"
    return f"consumer {fleet.consumer} has {there} and is {lag['state']}: {lag['reason']}"


@click.command(context_settings=CONTEXT)
@flags(StreamOptions, "stream", ("data", "events", "events_per_second"))
@click.option("--publish-every", type=click.IntRange(1), default=2, help="Steps between cuts.")
@click.option("--ranks", type=click.IntRange(1), default=2, help="Trainer processes.")
@click.option(
    "--model",
    type=click.Choice(["clicks", "mch"]),
    help="clicks: one row per id. mch: managed collision maps raw ids to rows; the default with int8 and int4.",
)
@flags(TrainingOptions, "training", ("input", "grad_accum", "amp"))
@click.option("--top-k", type=float, help="Only send the rows that changed most: a share below 1, or a number.")
@click.option(
    "--dtype",
    type=click.Choice([each.value for each in ValueType]),
    default="fp32",
    help="Type of the values that replicas receive.",
)
@click.option(
    "--serve",
    type=click.Choice(["int8", "int4", "shared"]),
    help="Run predictors that answer over HTTP: from tables that TorchRec quantises to int8 or int4, or as four "
    "processes from shared memory.",
)
@click.option(
    "--secure", is_flag=True, help="Use mutual TLS and roles: a certificate or a token for every process."
)
@click.option(
    "--poison-at",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="SHARE",
    help="After this share of the events, flip the trainer's labels, and roll the model back.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --poison-at: draw AUC over time into this PNG.",
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here.")
@click.option(
    "--hold",
    is_flag=True,
    help="Keep all processes running at the end, until Ctrl-C, so that you can inspect and break them.",
)
def demo(
    stream: StreamOptions,
    model: str | None,
    top_k: float | None,
    dtype: str,
    serve: str | None,
    file: Path | None,
    plot: Path | None,
    **settings: Any,
) -> None:
    """Run the whole path on loopback: a service, a trainer of two ranks and two replicas of one consumer.

    Every event is scored before the trainer learns from it: by the trainer, by a synced replica, and by one that
    is frozen halfway through. At the end the demo compares every row of both replicas with the trainer's,
    including buffers and the map of raw ids if the model has any, and the replicas' outputs for the last events.

    With --serve int8 or int4 the replicas are predictors that answer over HTTP; one of them is frozen halfway
    through. With --serve shared the first replica is a mirror, and four predictor processes serve from its memory.

    With --poison-at there are three fleets. One is live. So is a canary, which checks its own AUC. One follows the
    canary at a distance. Once the canary objects, the demo rolls the model back to the version of the followers,
    and compares all rows of the three fleets.
    """
    for name, written in {"--json": file, "--plot": plot}.items():
        if written and not written.parent.is_dir():  # Check before the run, not after it.
            raise click.UsageError(f"{name} {written}: there is no folder {written.parent}")
    if plot and settings["poison_at"] is None:
        raise click.UsageError("--plot needs --poison-at")
    if plot and find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
    shared = serve == "shared"
    if shared and (dtype != "fp32" or model == "mch" or settings["poison_at"] is not None):
        raise click.UsageError(
            "--serve shared serves rows as they are trained: leave out --dtype, --model mch and --poison-at"
        )
    if shared:
        serve, settings["workers"] = None, _WORKERS
    if serve and dtype not in ("fp32", f"{serve}-tbe"):
        raise click.UsageError(f"--serve {serve} quantises tables: leave out --dtype, or use --dtype {serve}-tbe")
    try:
        policy = Policy(top_k=top_k, value_type=ValueType(f"{serve}-tbe" if serve else dtype))
    except InvalidInput as error:
        raise click.UsageError(str(error)) from error
    if stream.data == "synthetic" and stream.events is None:
        stream = replace(stream, events=_SYNTHETIC_EVENTS)
    sizes = ModelOptions(managed=model == "mch" or (model is None and policy.value_type.tbe_bits is not None))
    # Exit as with Ctrl-C, so that the processes end too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    console = Console()
    console.print("loading PyTorch and TorchRec")
    # Import this late: it takes seconds, and --help does not need it.
    from deltasync.trainer.example.poison import draw, print_poisoned
    from deltasync.trainer.example.report import all_equal, print_report

    options = DemoOptions(stream=stream, sizes=sizes, policy=policy, **settings)
    report = run_demo(options, console)
    if options.poison_at is None:
        print_report(report, console)
    else:
        print_poisoned(report, console)
    if plot:
        draw(report, plot)
    if file:
        file.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if all_equal(report) else 1)
