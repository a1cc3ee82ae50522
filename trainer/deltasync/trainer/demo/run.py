"""The demo from its first process to its last."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deltasync.client import Admin
from deltasync.client.status import fetch_lag
from deltasync.core.errors import DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.core.words import counted
from deltasync.trainer.clicks.stream import open_stream
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.clicks.training_options import TrainingOptions, why_not_shared
from deltasync.trainer.demo.brokers import Brokers
from deltasync.trainer.demo.credentials import ADMIN, STATUS, TRAINER, Credentials, Plain, Secure
from deltasync.trainer.demo.holding import hold, lost_of
from deltasync.trainer.demo.kills import Kills
from deltasync.trainer.demo.options import DemoOptions, Fleet
from deltasync.trainer.demo.processes import DemoFailed, Processes
from deltasync.trainer.demo.progress import DemoProgress
from deltasync.trainer.demo.report import build_report
from deltasync.trainer.demo.services import Services, shared_log
from deltasync.trainer.demo.verdict import all_equal

MODEL = "clicks"
# States of a fleet whose replicas all hold every row as the model has it, or every release that there is.
IN_SYNC = frozenset({"in sync"})
CURRENT = frozenset({"in sync", "current"})
_POLL_SECONDS = 0.2
_READY_SECONDS = 300.0  # Each of many processes imports PyTorch first, on what may be few cores.
_CATCH_UP_SECONDS = 300.0
_HEAD_START_SECONDS = 0.5
_DRIVER = "driver"


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo; its report.

    Raises:
        DemoFailed: a process failed; the folder of logs is kept, as after any error.
        InvalidInput: the options do not go together, or the events cannot be read; nothing was started.
    """
    if options.stream.data != "synthetic":
        console.print(f"reading {options.stream.data}", highlight=False, soft_wrap=True)
    options = checked(options)
    folder = Path(tempfile.mkdtemp(prefix="deltasync-demo-"))
    try:
        restarts = play(options, options.fleets, folder, console)
        report = build_report(
            folder,
            ranks=options.ranks,
            replicas=options.fleets[0].replicas,
            frozen=options.fleets[-1].replicas[-1],
            stream=options.stream,
            restarts=restarts,
            policy=options.policy,
        )
    except (KeyboardInterrupt, SystemExit):
        _leave(folder, console, keep=options.keep)
        raise
    except DeltasyncError as error:
        raise DemoFailed(f"{error}\nlogs and results: {folder}") from error
    except Exception:
        _leave(folder, console, keep=True)
        raise
    _leave(folder, console, keep=options.keep or not all_equal(report))
    return report


def _leave(folder: Path, console: Console, *, keep: bool) -> None:
    """Name the folder of logs and results if it is to be kept, else remove it."""
    if keep:
        console.print(f"logs and results: {folder}", highlight=False, soft_wrap=True)
    else:
        shutil.rmtree(folder)


def checked(options: DemoOptions) -> DemoOptions:
    """The same options, with as many events as there are for every rank to have equally many.

    Raises:
        InvalidInput: they do not go together, or the events cannot be read, or are too few.
    """
    stream = options.stream
    if reason := why_not_shared(stream.batch_size, options.ranks, options.training):
        raise InvalidInput(reason)
    if stream.model.managed:
        _check_managed(options.training)
    if stream.model.dim % (multiple := options.policy.value_type.dim_multiple):
        value_type = options.policy.value_type.value
        raise InvalidInput(f"--dim {stream.model.dim}: value type {value_type} takes multiples of {multiple}")
    if options.fleets[0].serves and options.policy.ready_within_seconds is not None:
        # It is not ready to answer, and takes nothing new before it has answered.
        raise InvalidInput("--ready-within: the demo's predictors fall behind on purpose; leave it out")
    _check_brokers(options)
    events = _count_events(stream)
    if events < 2 * stream.batch_size:
        raise InvalidInput(f"{events} events: the demo needs at least two batches of {stream.batch_size}")
    return replace(options, stream=replace(stream, events=events - events % options.ranks))


def _check_brokers(options: DemoOptions) -> None:
    if options.services > 1 and not options.brokers:
        raise InvalidInput("--services: several of them share a log that brokers keep: give --brokers too")
    if options.kill_broker_at is not None and options.brokers < 3:
        raise InvalidInput("--kill-broker-at: fewer than three write nothing without one: give --brokers 3")


def _check_managed(training: TrainingOptions) -> None:
    if training.input == "tensordict":
        raise InvalidInput("--input tensordict: managed collision takes KeyedJaggedTensors only")
    if training.accumulate_tables:
        raise InvalidInput("--accumulate-tables: managed collision gives rows away between micro-batches")


def _count_events(stream: StreamOptions) -> int:
    if stream.data == "synthetic" and stream.events is not None:
        return stream.events
    return sum(len(block) for block in open_stream(stream.data, events=stream.events))


def play(
    options: DemoOptions,
    fleets: Sequence[Fleet],
    folder: Path,
    console: Console,
    until: frozenset[str] = IN_SYNC,
) -> int:
    """Run a service, a trainer and some fleets to the end of the stream, and on until all fleets are in one of the
    states `until`; returns how often the service was started again.

    What the processes have found is in `folder`. The last replica of the last fleet also scores with a copy that
    is frozen at half time, unless replicas are predictors: then a fleet may be.

    Args:
        options: `checked` ones.
        fleets: consumers and their replicas.
        folder: for logs and results.
        console: where progress is shown.
        until: the states to wait for after the last step.

    Raises:
        DemoFailed: a process failed.
    """
    stream = replace(options.stream, start_file=folder / "start")
    return _DemoRun(replace(options, stream=stream), fleets, folder, console).run(until)


class _DemoRun:
    """One run in a folder of its own."""

    def __init__(self, options: DemoOptions, fleets: Sequence[Fleet], folder: Path, console: Console) -> None:
        self._options = options
        self._fleets = fleets
        self._replicas = [name for fleet in fleets for name in fleet.replicas]
        self._served = [name for fleet in fleets if fleet.serves for name in fleet.replicas]
        # In the order in which they are stopped: the driver asks its last question then.
        self._followers = [_DRIVER] * bool(self._served) + self._replicas
        self._stream = options.stream
        self._folder = folder
        self._console = console
        self._half = (options.stream.events or 0) // 2
        self._steps = -(-(self._stream.events or 0) // self._stream.batch_size)
        self._credentials: Credentials = Secure(folder, MODEL, fleets) if options.secure else Plain()

    def run(self, until: frozenset[str]) -> int:
        """Run all processes to their end; how often the service was started again."""
        with (
            self._log_of_brokers() as brokers,
            Processes(self._folder) as processes,
            DemoProgress(self._console, self._steps) as progress,
        ):
            service = self._start_service(processes, brokers, progress)
            self._start_trainer(processes)
            self._start_replicas(processes)
            progress.say("starting the trainer and the replicas, and waiting until these hold its first model")
            self._await(processes, service, IN_SYNC, _READY_SECONDS)
            (self._folder / "start.new").write_text(str(time.time() + _HEAD_START_SECONDS))
            (self._folder / "start.new").rename(self._folder / "start")
            kills = Kills(self._options, self._steps, service, brokers, progress.say)
            self._watch(processes, service, progress, kills)
            lacking = "row" if until == IN_SYNC else "release"
            progress.say(f"all {self._steps} steps are trained; waiting until the replicas hold every {lacking}")
            progress.show(self._await(processes, service, until, _CATCH_UP_SECONDS, progress.show_wait))
            ended = self._hold(processes, service, progress) if self._options.hold else set[str]()
            progress.say("stopping the replicas and the service")
            for name in (*self._followers, *service.names):
                if name not in ended:
                    processes.stop(name)
            progress.say("comparing what they held with what the trainer has")
        return service.restarts

    def _log_of_brokers(self) -> AbstractContextManager[Brokers | None]:
        if count := self._options.brokers:
            self._console.print(f"starting {count} brokers", highlight=False)
        return Brokers(self._folder / "brokers", count) if count else nullcontext()

    def _start_service(self, processes: Processes, brokers: Brokers | None, progress: DemoProgress) -> Services:
        progress.say("starting the service; the first time its kernels are compiled, half a minute or more")
        where = shared_log(brokers, self._folder) if brokers else []
        service = self._credentials.start(processes, self._options.services, where)
        for fleet in self._fleets:
            Admin(self._credentials.endpoint(ADMIN)).create_consumer(fleet.consumer, MODEL, fleet.policy)
        progress.say(f"service: pid {', '.join(map(str, service.pids))}, gRPC on {service.grpc}; try meanwhile")
        lag, asking = self._fleets[0].consumer, self._credentials.arguments(STATUS)
        secure, http = f"  deltasync lag {lag} {' '.join(asking)}", service.http.partition(",")[0]
        progress.say(secure if self._options.secure else f"  curl {http}/consumers/{lag}/lag")
        progress.say(f"  {http}/ in a browser{', with the token' if self._options.secure else ''}")
        return service

    def _start_trainer(self, processes: Processes) -> None:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self._options.ranks)]
        publish = ["--model", MODEL, "--publish-every", str(self._options.publish_every)]
        publish += self._credentials.arguments(TRAINER)
        results = ["--results", str(self._folder)]
        how = [*self._stream.arguments(), *self._options.training.arguments()]
        processes.start("trainer", [*torchrun, "-m", "deltasync.trainer.train", *publish, *results, *how])

    def _start_replicas(self, processes: Processes) -> None:
        results = ["--results", str(self._folder)]
        for fleet in self._fleets:
            for name in fleet.replicas:
                subscribe = ["--consumer", fleet.consumer, "--replica", name, *self._credentials.arguments(name)]
                command = self._predictor(fleet) if fleet.serves else self._replica(name)
                processes.start(name, [*command, *subscribe, *results])
        if self._served:
            asked = [word for name in self._served for word in ("--predictor", name)]
            processes.start(
                _DRIVER, ["deltasync.trainer.demo.driver", *asked, *results, *self._stream.arguments()]
            )

    def _replica(self, name: str) -> list[str]:
        frozen = ["--freeze-at", str(self._half)] if name == self._replicas[-1] else []
        return ["deltasync.trainer.demo.replica", "--hold-releases", *frozen, *self._stream.arguments()]

    def _predictor(self, fleet: Fleet) -> list[str]:
        frozen = ["--last-step", str(self._half // self._stream.batch_size)] if fleet.frozen else []
        how = ["--value-type", fleet.policy.value_type.value, *self._stream.model.arguments()]
        return ["deltasync.trainer.demo.serving", *how, *frozen]

    def _hold(self, processes: Processes, service: Services, progress: DemoProgress) -> set[str]:
        """Keep everything as it is until Ctrl-C, though some of it is broken on purpose; what has ended by then.

        Raises:
            DemoFailed: a replica has, and left nothing that could be compared.
        """
        names = [*self._followers, *service.names]
        pids = ", ".join(f"{name} {processes.pid(name)}" for name in names)
        address = service.http.partition(",")[0]
        progress.say(f"the trainer has ended; all else stays up until Ctrl-C: {address}/ shows it")
        progress.say(f"  break what you like, by its pid: {pids}")
        ended = hold(processes, names, progress.say)
        if lost := lost_of(processes, self._followers):
            raise DemoFailed(f"nothing is compared, since this ended while it was held: {lost}")
        return ended

    def _watch(self, processes: Processes, service: Services, progress: DemoProgress, kills: Kills) -> None:
        while processes.running("trainer"):
            if lags := self._poll(processes, service):
                progress.show(lags[0])
                kills.look(lags[0]["head_step"])
            time.sleep(_POLL_SECONDS)

    def _await(
        self,
        processes: Processes,
        service: Services,
        states: frozenset[str],
        seconds: float,
        show: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Wait until all fleets are whole and in one of these states; `show` and return the lag of the first."""
        deadline = time.monotonic() + seconds
        while True:
            lags = self._poll(processes, service)
            lacking = [(lag, fleet) for lag, fleet in self._waited_for(lags) if not _is_in(states, lag, fleet)]
            if lags and not lacking:
                return lags[0]
            if lags:
                show(lags[0])
            if time.monotonic() > deadline:
                text = f"the replicas did not hold the model within {seconds:.0f} s"
                raise DemoFailed(f"{text}: {hindrance(lacking)}")
            time.sleep(_POLL_SECONDS)

    def _waited_for(self, lags: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Fleet]]:
        """Fleets and their lags: those that are frozen only as long as nobody has trained."""
        for lag, fleet in zip(lags, self._fleets, strict=True):
            if not (fleet.frozen and lag["head_step"]):
                yield lag, fleet

    def _poll(self, processes: Processes, service: Services) -> list[dict[str, Any]]:
        """The service's answer for each fleet; none while it is away."""
        service.keep_alive()
        for name in ("trainer", *self._followers):
            processes.running(name)
        try:
            status = self._credentials.endpoint(STATUS)
            return [fetch_lag(status, fleet.consumer) for fleet in self._fleets]
        except ServiceUnavailable:
            return []


def _is_in(states: frozenset[str], lag: dict[str, Any], fleet: Fleet) -> bool:
    whole = len(lag["replicas"]) == len(fleet.replicas)
    return bool(lag["head"]) and whole and lag["state"] in states and not lag["lag"]["versions"]


def hindrance(lacking: Sequence[tuple[dict[str, Any], Fleet]]) -> str:
    """Why fleets do not hold the model, by their lags; none where the service does not answer."""
    words = (
        f"consumer {fleet.consumer} has {len(lag['replicas'])} of {counted(len(fleet.replicas), 'replica')} "
        f"and is {lag['state']}: {lag['reason']}"
        for lag, fleet in lacking
    )
    return "; ".join(words) or "the service does not answer"
