"""The demo from its first process to its last."""

import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sync_service.cli.lag import fetch_lag
from sync_service.errors import InvalidInput, ServiceUnavailable
from trainer.data.stream import open_stream
from trainer.demo.processes import DemoFailed, Processes, Service
from trainer.demo.progress import DemoProgress
from trainer.demo.report import build_report
from trainer.stream_options import StreamOptions
from trainer.training_options import TrainingOptions, why_not_shared

CONSUMER, MODEL, REPLICAS = "predictors", "clicks", ["replica-0", "replica-1"]
_POLL_SECONDS = 0.2
_READY_SECONDS = 120.0
_CATCH_UP_SECONDS = 60.0
_HEAD_START_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What to run.

    Attributes:
        stream: the events and the model.
        training: how it is trained.
        ranks: trainer processes.
        publish_every: steps between cuts.
        kill_service_at: kill the service with SIGKILL at this share of the steps; None = never.
        keep: keep the folder of logs and results.
    """

    stream: StreamOptions
    training: TrainingOptions
    ranks: int = 2
    publish_every: int = 2
    kill_service_at: float | None = None
    keep: bool = False


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Run the demo; its report.

    Raises:
        DemoFailed: a process failed; the folder of logs is kept.
        DataError: the events cannot be read.
    """
    _check(options)
    events = _count_events(options)
    folder = Path(tempfile.mkdtemp(prefix="deltasync-demo-"))
    stream = replace(options.stream, events=events, start_file=folder / "start")
    demo = _Demo(replace(options, stream=stream), folder, console)
    try:
        restarts = demo.run()
        report = build_report(folder, ranks=options.ranks, replicas=REPLICAS, events=events, restarts=restarts)
    except DemoFailed as error:
        raise DemoFailed(f"{error}\nlogs and results: {folder}") from error
    if options.keep or not report["rows_equal"]:
        console.print(f"logs and results: {folder}", highlight=False, soft_wrap=True)
    else:
        shutil.rmtree(folder)
    return report


def _check(options: DemoOptions) -> None:
    if reason := why_not_shared(options.stream.batch_size, options.ranks, options.training):
        raise InvalidInput(reason)


def _count_events(options: DemoOptions) -> int:
    """How many events there are, for every rank to have as many."""
    wanted = options.stream.events
    if options.stream.data == "synthetic" and wanted is not None:
        found = wanted
    else:
        found = sum(len(block) for block in open_stream(options.stream.data, events=wanted))
    if found < 2 * options.stream.batch_size:
        raise DemoFailed(f"{found} events: the demo needs at least two batches of {options.stream.batch_size}")
    return found - found % options.ranks


class _Demo:
    """One run in a folder of its own."""

    def __init__(self, options: DemoOptions, folder: Path, console: Console) -> None:
        self._options = options
        self._stream = options.stream
        self._folder = folder
        self._console = console
        self._steps = -(-(self._stream.events or 0) // self._stream.batch_size)
        self._killed = False

    def run(self) -> int:
        """Run all processes to their end; how often the service was started again."""
        with Processes(self._folder) as processes, DemoProgress(self._console, self._steps) as progress:
            service = Service(processes, ["--consumer", f"{CONSUMER}={MODEL}"])
            progress.say(f"service: pid {processes.pid(service.NAME)}, gRPC on {service.grpc}; try meanwhile")
            progress.say(f"  curl {service.http}/consumers/{CONSUMER}/lag")
            self._start_trainer(processes, service.grpc)
            self._start_replicas(processes, service.grpc)
            self._await_replicas(processes, service)
            (self._folder / "start.new").write_text(str(time.time() + _HEAD_START_SECONDS))
            (self._folder / "start.new").rename(self._folder / "start")
            self._watch(processes, service, progress)
            self._catch_up(processes, service, progress)
            for name in (*REPLICAS, Service.NAME):
                processes.stop(name)
        return service.restarts

    def _start_trainer(self, processes: Processes, service: str) -> None:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(self._options.ranks)]
        publish = ["--service", service, "--model", MODEL, "--publish-every", str(self._options.publish_every)]
        results = ["--results", str(self._folder)]
        how = [*self._stream.arguments(), *self._options.training.arguments()]
        processes.start("trainer", [*torchrun, "-m", "trainer.train", *publish, *results, *how])

    def _start_replicas(self, processes: Processes, service: str) -> None:
        half = (self._stream.events or 0) // 2
        for name in REPLICAS:
            frozen = ["--freeze-at", str(half)] if name == REPLICAS[-1] else []
            subscribe = ["--service", service, "--consumer", CONSUMER, "--replica", name]
            results = ["--hold-releases", "--results", str(self._folder), *frozen]
            processes.start(name, ["trainer.demo.replica", *subscribe, *results, *self._stream.arguments()])

    def _await_replicas(self, processes: Processes, service: Service) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not _in_sync(self._poll(processes, service)):
            if time.monotonic() > deadline:
                raise DemoFailed(f"the replicas did not hold the model within {_READY_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _watch(self, processes: Processes, service: Service, progress: DemoProgress) -> None:
        while processes.running("trainer"):
            if lag := self._poll(processes, service):
                progress.show(lag)
                self._maybe_kill(lag["head_step"], processes, progress)
            time.sleep(_POLL_SECONDS)

    def _maybe_kill(self, step: int, processes: Processes, progress: DemoProgress) -> None:
        share = self._options.kill_service_at
        if share is not None and not self._killed and step >= share * self._steps:
            processes.kill(Service.NAME)
            self._killed = True
            progress.say(f"step {step}: the service was killed with SIGKILL")

    def _catch_up(self, processes: Processes, service: Service, progress: DemoProgress) -> None:
        deadline = time.monotonic() + _CATCH_UP_SECONDS
        while not _in_sync(lag := self._poll(processes, service)):
            if time.monotonic() > deadline:
                raise DemoFailed(f"the replicas did not catch up within {_CATCH_UP_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        if lag:
            progress.show(lag)

    def _poll(self, processes: Processes, service: Service) -> dict[str, Any] | None:
        """The service's answer for the consumer; None while it is away."""
        service.keep_alive()
        for name in ("trainer", *REPLICAS):
            processes.running(name)
        try:
            return fetch_lag(service.http, CONSUMER)
        except ServiceUnavailable:
            return None


def _in_sync(lag: dict[str, Any] | None) -> bool:
    """Whether both replicas are there and hold the newest version."""
    if lag is None or not lag["head"]:
        return False
    present = [replica for replica in lag["replicas"] if replica["connected"]]
    return len(present) == len(REPLICAS) and all(replica["offset"] == lag["head"] for replica in present)
