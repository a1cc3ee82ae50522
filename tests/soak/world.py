"""Everything that runs in a soak, as faults reach it."""

import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import fsspec
from tests.soak.crew import Crew
from tests.soak.fleet import CHANGING, CLICKS, PAIR, Fleet, Follower, Subscription
from tests.soak.fuse import blown
from tests.soak.journal import replace_file
from tests.soak.leftovers import directory_bytes
from tests.soak.plain_model import PlainModel, fuse_file
from tests.support.object_storage import ObjectStorage
from tests.support.ports import free_port
from tests.support.proxy import Proxy

from deltasync.client import (
    Admin,
    Contradiction,
    Endpoint,
    InvalidInput,
    NotFound,
    ServiceUnavailable,
    StorageFailed,
)
from deltasync.core.policy import Policy
from deltasync.kernels.compiled import warm
from deltasync.service.backup import BackupPlace
from deltasync.trainer.example.processes import DemoFailed, Processes

T = TypeVar("T")

SERVICE = "service"
# The consumer that the service's configuration file makes.
CONFIGURED = "configured"
# Of what trainers publish, no norm ever grows by so much.
_MOST_GROWTH = 1e6
_CHECKPOINT_BYTES = 40_000
_BUCKET = "soak"
_POLL_SECONDS = 0.1
_LOOKS_PER_SIZE = 20
_CALL_SECONDS, _CALLS_SECONDS = 5.0, 180.0
REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


class SoakFailed(DemoFailed):
    """What a soak waits for did not come."""


def comes(there: Callable[[], bool], seconds: float) -> bool:
    """Wait for something for so long at most; whether it has come."""
    deadline = time.monotonic() + seconds
    while not (found := there()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


class World:
    """The service, trainers, replicas, and the links between them.

    Attributes:
        fleet: what was asked for.
        crew: the processes.
        links: by which replicas, by their names, and trainers, by their models' names, reach the service.
        storage: by which the service reaches object storage; None without one.
        plain: the plain trainers by model.
        data_dir: the service's.
        largest_directory: the most bytes that this has had.
        put_back_unix_ns: when this was put back by hand, nanoseconds since 1970: the service has gone on from
            earlier versions since, in the same history.
        grpc: where the service answers trainers and replicas.
        alone: held by who would be in the way of another one that holds it: a backup that is put back brings back
            models and consumers that were there for a while only, or takes them away.
        poisoning: held while somebody publishes what the service is to refuse, or to quarantine.
    """

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.data_dir = folder / "data"
        self.plain: dict[str, PlainModel] = {}
        self.links: dict[str, Proxy] = {}
        self.storage: Proxy | None = None
        self._processes = Processes(folder)
        self.crew = Crew(self._processes)
        self._folder = folder
        self._configuration = folder / "service.toml"
        self._token = secrets.token_hex()
        self.grpc, self._http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.largest_directory = 0
        self.put_back_unix_ns: list[int] = []
        self.alone, self.poisoning = threading.Lock(), threading.Lock()
        self._fuses = threading.Lock()
        self._ending = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._redis: subprocess.Popen[bytes] | None = None
        self._objects = ObjectStorage(folder / "storage") if fleet.storage else None

    def start(self) -> None:
        """Start everything; the consumers are there first."""
        warm()
        self.configure(Policy())
        if self._objects:
            self._start_objects(self._objects)
        self.crew.start(SERVICE, self._service_command())
        for each in self.fleet.subscriptions:
            self.call(lambda admin, each=each: admin.create_consumer(each.name, each.model, each.policy))  # type: ignore[misc]
        for name, ranks in self.fleet.models.items():
            self.plain[name] = PlainModel(self.crew, name, self.open_link(name), ranks)
        if self.fleet.clicks:
            self.open_link(CLICKS)
            self.crew.start_team(f"{CLICKS}-rank", self._start_clicks)
        if any(follower.store == "redis" for follower in self.fleet.followers):
            self._start_redis()
        for follower in self.fleet.followers:
            self.follow(follower)

    def follow(self, follower: Follower) -> None:
        self.open_link(follower.name)
        self.crew.start(
            follower.name, self._follower_command(follower, self.fleet.subscription(follower.consumer))
        )

    def pass_by(self, subscription: Subscription, seconds: float) -> None:
        """Make a consumer, have its replicas follow it for a while, and delete it."""
        self.call(lambda admin: admin.create_consumer(subscription.name, subscription.model, subscription.policy))
        for follower in subscription.replicas:
            self.open_link(follower.name)
            self.crew.start(follower.name, self._follower_command(follower, subscription))
        time.sleep(seconds)
        self.crew.dismiss(follower.name for follower in subscription.replicas)
        with suppress(NotFound):  # It was deleted, and the answer lost.
            self.call(lambda admin: admin.delete_consumer(subscription.name))

    def configure(self, policy: Policy) -> None:
        """Write the service's configuration, a consumer with a policy: read at a start, and on SIGHUP."""
        top_k = f"top_k = {policy.top_k}\n" if policy.top_k else ""
        replace_file(
            self._configuration,
            f'admin_token = "{self._token}"\n[consumers.{CONFIGURED}]\nmodel = "{PAIR}"\n{top_k}',
        )

    def policies(self) -> dict[str, Policy]:
        """The consumers' policies, as the service has them."""
        consumers = self.call(lambda admin: admin.consumers())
        return {each["consumer"]: Policy.from_dict(each["policy"]) for each in consumers}

    def open_link(self, name: str) -> str:
        """Listen for connections of a replica, or of the ranks of a model, to the service; where, HOST:PORT."""
        link = self.links[name] = Proxy(self.grpc)
        return link.address

    def call(self, call: Callable[[Admin], T]) -> T:
        """Ask the service, again and again while it is away."""
        admin = Admin(Endpoint(f"http://{self._http}", self._token, _CALL_SECONDS))
        deadline = time.monotonic() + _CALLS_SECONDS
        while True:
            try:
                return call(admin)
            except (ServiceUnavailable, StorageFailed) as error:
                if time.monotonic() > deadline:
                    raise SoakFailed(
                        f"the service has not answered for {_CALLS_SECONDS:.0f} s: {error}"
                    ) from error
                time.sleep(_POLL_SECONDS)

    def lag(self, consumer: str) -> dict[str, Any] | None:
        """A consumer's lag; None while the service is away."""
        try:
            return Admin(Endpoint(f"http://{self._http}", timeout_seconds=_CALL_SECONDS)).consumer(consumer)
        except (ServiceUnavailable, NotFound):
            return None

    def heads(self) -> dict[str, int]:
        """The newest version of each model; empty while the service is away."""
        lags = {each.model: self.lag(each.name) for each in self.fleet.subscriptions}
        return {model: lag["head"] for model, lag in lags.items() if lag}

    def settle(self, call: Callable[[Admin], object]) -> None:
        """Ask the service for the end of something that is there, also while it has not noticed yet that nobody
        uses it any more.
        """

        def ended() -> bool:
            try:
                self.call(call)
            except Contradiction:
                return False
            except NotFound:  # It was done, and the answer lost.
                return True
            return True

        self.await_there(ended, "what an operator has asked for")

    def state(self, consumer: str) -> str:
        """The state that a consumer's lag has; empty while the service is away."""
        lag = self.lag(consumer)
        return str(lag["state"]) if lag else ""

    def ready(self) -> bool:
        """Whether /readyz says that the service is ready."""
        try:
            with urllib.request.urlopen(f"http://{self._http}/readyz", timeout=_CALL_SECONDS):
                return True
        except OSError:  # Also one of HTTP: it says why it is not.
            return False

    def answers(self) -> bool:
        """Whether /readyz answers, even if the service is not ready."""
        try:
            with urllib.request.urlopen(f"http://{self._http}/readyz", timeout=_CALL_SECONDS):
                return True
        except OSError as error:
            return isinstance(error, urllib.error.HTTPError)

    def await_there(self, there: Callable[[], bool], what: str) -> None:
        """Wait for what has to come."""
        if not comes(there, _CALLS_SECONDS):
            raise SoakFailed(f"{what} has not come within {_CALLS_SECONDS:.0f} s")

    def serve(self, *settings: str) -> None:
        """Restart the service with further settings, or without those."""
        self.crew.restart(SERVICE, command=[*self._service_command(), *settings])

    def back_up(self, directory: Path) -> None:
        """Have the service make a backup; again and again while it is away."""
        try:
            self.call(lambda admin: admin.backup(str(directory), _CALLS_SECONDS))
        except InvalidInput:
            if not BackupPlace(str(directory)).read():  # It was complete, and the answer lost.
                raise

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder that is there inside of the block."""
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=self._folder) as folder:
            yield Path(folder)

    def run_with_fuse(self, name: str, command: Sequence[str], moment: str) -> int:
        """Run a command of `deltasync`, which kills itself at a moment; its status."""
        fuse = self.fuse(name)
        fuse.write_text(moment)
        status = self.crew.run(name, ["tests.soak.fuse", str(fuse), "deltasync", *command])
        fuse.unlink(missing_ok=True)
        blown(fuse).unlink(missing_ok=True)
        return status

    def drop_what_is_under_way(self) -> None:
        """Have nothing arrive any more that a service that was killed has sent."""
        for link in self.links.values():
            link.cut()
        self.crew.thaw()

    def note_put_back(self) -> None:
        """Note that from now on the service has what a copy of its directory had, which is put back by hand."""
        self.put_back_unix_ns.append(time.time_ns())

    def fuse(self, process: str) -> Path:
        return fuse_file(self._folder, process)

    def resume_all(self) -> None:
        """Let consumers go on: one that was paused when a backup was made is so again once that is put back."""
        for each in self.fleet.subscriptions:
            self.call(lambda admin, name=each.name: admin.resume_consumer(name))  # type: ignore[misc]

    def burn(
        self, process: str, moment: str, seconds: float, meanwhile: Callable[[], object] = lambda: None
    ) -> bool:
        """Have a process kill itself at its next such moment, and wait for that; whether it has.

        `meanwhile` is done once the process waits for the moment.
        """
        fuse = self.fuse(process)
        with self._fuses:
            ends = time.monotonic() + seconds
            fuse.write_text(moment)
            meanwhile()
            comes(blown(fuse).exists, ends - time.monotonic())
            fuse.unlink(missing_ok=True)
            done = blown(fuse).exists()
            blown(fuse).unlink(missing_ok=True)
            return done

    def _service_command(self) -> list[str]:
        fuse = self.fuse(SERVICE)
        ports = ["--grpc-port", self.grpc.rpartition(":")[2], "--http-port", self._http.rpartition(":")[2]]
        serve = ["serve", "--data-dir", str(self.data_dir), *ports]
        settings = ["--checkpoint-bytes", str(_CHECKPOINT_BYTES), "--max-norm-growth", str(_MOST_GROWTH)]
        config = ["--config", str(self._configuration)]
        copies = ["--checkpoints", f"s3://{_BUCKET}/models"] if self.storage else []
        return ["tests.soak.fuse", str(fuse), "deltasync", *serve, *settings, *config, *copies]

    def _start_clicks(self) -> None:
        port, service = free_port(), self.links[CLICKS].address
        for rank in range(self.fleet.clicks):
            who = ["--rank", str(rank), "--ranks", str(self.fleet.clicks), "--port", str(port)]
            where = ["--service", service, "--folder", str(self._folder)]
            self.crew.start(f"{CLICKS}-rank-{rank}", ["tests.soak.torchrec_rank", *who, *where])

    def _follower_command(self, follower: Follower, subscription: Subscription) -> list[str]:
        plain = subscription.model != CLICKS and subscription.name != CHANGING
        whole = plain and subscription.policy.sends_everything
        who = ["--consumer", follower.consumer, "--replica", follower.name, "--store", follower.store]
        where = ["--service", self.links[follower.name].address, "--folder", str(self._folder)]
        how = [*(["--redis", str(self._folder / "redis.sock")] if self._redis else []), *(["--whole"] * whole)]
        fuse = str(self.fuse(follower.name))
        return ["tests.soak.fuse", fuse, "tests.soak.replica", *who, *where, *how]

    def _start_objects(self, objects: ObjectStorage) -> None:
        objects.start()
        fsspec.filesystem("s3", **objects.settings).mkdir(_BUCKET)
        self.storage = Proxy(objects.url.rpartition("/")[2])
        os.environ |= {"AWS_ENDPOINT_URL": f"http://{self.storage.address}"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}

    def _start_redis(self) -> None:
        if REDIS is None:
            raise SoakFailed("there is no redis-server")
        where = ["--port", "0", "--unixsocket", str(self._folder / "redis.sock"), "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("wb") as log:
            self._redis = subprocess.Popen([REDIS, *where, "--save", ""], stdout=log)
        while not (self._folder / "redis.sock").exists():
            time.sleep(_POLL_SECONDS)

    def _supervise(self) -> None:
        """Start again what was killed, whatever others wait for."""
        for count in itertools.count():
            self.crew.supervise()
            if count % _LOOKS_PER_SIZE == 0:
                self.largest_directory = max(self.largest_directory, directory_bytes(self.data_dir))
            if self._ending.wait(_POLL_SECONDS):
                return

    def __enter__(self) -> Self:
        self._processes.__enter__()
        self._supervisor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._supervisor.join()
        self.crew.close()
        self._processes.__exit__(kind, error, trace)
        if self._redis:
            self._redis.kill()
            self._redis.wait()
        if self.storage and self._objects:
            self.storage.close()
            self._objects.kill()
        for link in self.links.values():
            link.close()
