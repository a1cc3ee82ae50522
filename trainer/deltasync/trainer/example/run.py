"""9. A run of a service, a trainer and replicas on loopback, which the demo's modes and a benchmark share."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console

from deltasync.base.words import counted
from deltasync.client import Admin, Endpoint, Policy
from deltasync.trainer.example.options import ModelOptions, StreamOptions, arguments
from deltasync.trainer.example.processes import DemoFailed, DemoService, Processes

MODEL = "clicks"
# States of a consumer whose replicas have every row of the model, or every release.
IN_SYNC = frozenset({"in sync"})
CURRENT = frozenset({"in sync", "current"})
# Many processes import PyTorch before they are ready, perhaps on few cores.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS, _HEAD_START_SECONDS = 0.2, 0.5


@dataclass(frozen=True)
class Fleet:
    """A consumer and its replicas, with further arguments of these. Names are unique among all fleets."""

    consumer: str
    replicas: tuple[str, ...]
    policy: Policy = field(default_factory=Policy)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Options of the demo. The command's help explains them."""

    stream: StreamOptions
    sizes: ModelOptions = field(default_factory=ModelOptions)
    ranks: int = 2
    publish_every: int = 2
    policy: Policy = field(default_factory=Policy)
    hold: bool = False
    poison_at: float | None = None

    @property
    def events(self) -> int:
        """The number of events, which `checked` has filled in."""
        return self.stream.events or 0


class DemoRun:
    """One run of the processes, with the operator's connection, and names of processes that must not fail."""

    service: DemoService
    admin: Admin

    def __init__(
        self, options: DemoOptions, fleets: Sequence[Fleet], processes: Processes, console: Console
    ) -> None:
        self._options, self._fleets, self._processes, self._console = options, fleets, processes, console
        self.steps = -(-options.events // options.stream.batch_size)
        self.watched = ["trainer", *(name for fleet in fleets for name in fleet.replicas), "service"]
        self._tenths = 0

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def start(self, *, service: Sequence[str] = (), trainer: Sequence[str] = ()) -> None:
        """Start all processes, with further arguments, and wait until the replicas have the first model."""
        options, start, folder = self._options, self._processes.start, self._processes.folder
        self.say("starting the service; the first time, compiling its kernels takes half a minute or more")
        token, file = secrets.token_urlsafe(), folder / "admin-token"
        file.touch(0o600)
        file.write_text(token)
        self.service = DemoService(self._processes, ["--admin-token-file", str(file), *service])
        self.say(f"service: gRPC on {self.service.grpc}; while it runs, open {self.service.http}/")
        self.say("starting the trainer and the replicas, and waiting until the replicas have the first model")
        self.admin = Admin(Endpoint(self.service.grpc, http=self.service.http, token=token))
        endpoint = folder / "endpoint.toml"
        endpoint.write_text(f'address = "{self.service.grpc}"\nhttp = "{self.service.http}"\n')
        stream = replace(options.stream, start_file=folder / "start")
        shared = [*arguments(stream, options.sizes), f"--endpoint={endpoint}", f"--results={folder}"]
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}", "-m"]
        publish = [f"--model={MODEL}", f"--publish-every={options.publish_every}", *trainer]
        start("trainer", [*torchrun, "deltasync.trainer.example.train", *publish, *shared])
        for fleet in self._fleets:
            self.admin.create_consumer(fleet.consumer, MODEL, fleet.policy)
            for name in fleet.replicas:
                follow = [f"--consumer={fleet.consumer}", f"--replica={name}", *fleet.arguments]
                follow.append(f"--freeze-at={options.events // 2}")
                start(name, ["deltasync.trainer.example.replica", *follow, *shared])
        self.wait_for(IN_SYNC)

    def begin_stream(self) -> None:
        """Let the first event arrive in a moment."""
        file = self._processes.folder / "start.new"
        file.write_text(str(time.time() + _HEAD_START_SECONDS))
        file.rename(file.with_name("start"))

    def lags(self) -> dict[str, dict[str, Any]]:
        """The lag of each consumer; DemoFailed if a process failed. Prints a line for each tenth of the steps."""
        for name in self.watched:
            self._processes.running(name)
        lags = {fleet.consumer: Admin(self.service.http).consumer(fleet.consumer) for fleet in self._fleets}
        lag = lags[self._fleets[0].consumer]
        if (tenths := lag["head_step"] * 10 // self.steps) > self._tenths:
            self._tenths, behind = tenths, lag["lag"]
            far = f"{counted(behind['versions'], 'version')}, {counted(behind['rows'], 'row')}"
            head = f"step {lag['head_step']}/{self.steps}  version {lag['head']}"
            self.say(f"{head}  lag {far}, {behind['seconds']:.1f} s")
        return lags

    def wait_for(self, states: frozenset[str]) -> None:
        """Wait until all fleets are complete and in one of these states."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while missing := [why for fleet in self._fleets if (why := _missing(self.lags(), fleet, states))]:
            if time.monotonic() > deadline:
                why = "; ".join(missing)
                raise DemoFailed(f"the replicas did not get the model within {_PATIENCE_SECONDS:.0f} s: {why}")
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Stop the replicas, which write their results, and the service."""
        self.say("stopping the replicas and the service, and comparing the rows")
        for fleet in self._fleets:
            for name in fleet.replicas:
                self._processes.stop(name)
        self._processes.stop("service")


def _missing(lags: dict[str, dict[str, Any]], fleet: Fleet, states: frozenset[str]) -> str:
    """Why a fleet is not complete or not in one of the states; empty if it is."""
    lag = lags[fleet.consumer]
    complete = len(lag["replicas"]) == len(fleet.replicas)
    if lag["head"] and complete and lag["state"] in states and not lag["lag"]["versions"]:
        return ""
    there = f"{len(lag['replicas'])} of {counted(len(fleet.replicas), 'replica')}"
    return f"consumer {fleet.consumer} has {there} and is {lag['state']}: {lag['reason']}"
