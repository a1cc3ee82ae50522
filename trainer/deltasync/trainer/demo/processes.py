"""The demo's processes: started on loopback, watched, and ended whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from deltasync.core.errors import DeltasyncError
from deltasync.kernels.compiled import warm

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.02
_TAIL_LINES = 20


class DemoFailed(DeltasyncError):
    """A process of the demo failed, or did not do its part in time."""


class Processes:
    """Named child processes, each with a log file in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: list[str]) -> None:
        """Start `python -m ARGUMENTS`, with its output in NAME.log."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DELTASYNC_")}
        # One thread each: there are more processes than cores.
        kept["DELTASYNC_LOG_FORMAT"] = "text"  # People read it where something has failed.
        environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "no_proxy": "127.0.0.1,localhost"}
        with self.log(name).open("ab") as log:
            # A group of its own: Ctrl-C is for whoever has started it, who ends it then.
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
            )

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / f"{name}.log"

    def running(self, name: str) -> bool:
        """Whether a process runs.

        Raises:
            DemoFailed: it ended with a status other than 0.
        """
        status = self._running[name].poll()
        if status:
            raise DemoFailed(f"{name} ended with status {status}; the end of its log:\n{self.tail(name)}")
        return status is None

    def killed(self, name: str) -> bool:
        """Whether a process was killed with SIGKILL.

        Raises:
            DemoFailed: it ended in another way.
        """
        if self._running[name].poll() == -signal.SIGKILL:
            return True
        if not self.running(name):
            raise DemoFailed(f"{name} ended by itself; the end of its log:\n{self.tail(name)}")
        return False

    def status(self, name: str) -> int | None:
        """The status that a process has ended with; None while it runs."""
        return self._running[name].poll()

    def pid(self, name: str) -> int:
        """The process id of a process."""
        return self._running[name].pid

    def wait(self, name: str) -> None:
        """Wait until a process has ended by itself.

        Raises:
            DemoFailed: it ended with a status other than 0.
        """
        self._running[name].wait()
        self.running(name)

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL and wait until it is gone."""
        self._running[name].kill()
        self._running[name].wait()

    def stop(self, name: str) -> None:
        """Ask a process to end, also one that was halted, and wait until it has.

        Raises:
            DemoFailed: it did not in time, or ended with a status other than 0.
        """
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._running[name].send_signal(number)
        try:
            self._running[name].wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{name} did not end within {_STOP_SECONDS:.0f} s of SIGTERM") from None
        self.running(name)

    def tail(self, name: str) -> str:
        """The last lines of a process's log."""
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        for process in self._running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Service:
    """The sync service, which is started again on the same ports when it is killed, as a cluster would.

    Attributes:
        name: its name among the processes.
        grpc: where it answers trainers and replicas.
        http: where it answers operators.
        restarts: how often it was started again.
    """

    def __init__(
        self, processes: Processes, arguments: list[str], admin_token: str = "", name: str = "service"
    ) -> None:
        self._processes, self.name = processes, name
        self._arguments = arguments
        if admin_token:
            path = processes.folder / "admin-token"
            path.touch(0o600)
            path.write_text(admin_token)
            self._arguments = [*arguments, "--admin-token-file", str(path)]
        self._data = processes.folder / ("data" if name == "service" else f"data-{name}")
        self.restarts = 0
        warm()  # Here, where nobody waits for it to listen, and once for all that are started later.
        self._start("0", "0")
        endpoints = json.loads(self._await_endpoints().read_text())
        self.grpc, self.http = endpoints["grpc"], endpoints["http"]

    def keep_alive(self) -> None:
        """Start it again if it was killed with SIGKILL.

        Raises:
            DemoFailed: it ended in another way, and would do so again.
        """
        if self._processes.killed(self.name):
            self.restarts += 1
            self._start(self.grpc.rpartition(":")[2], self.http.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """Its process id, which is another one once it was started again."""
        return self._processes.pid(self.name)

    @property
    def table_bytes(self) -> int:
        """Bytes of the files of tables and views."""
        return sum(path.stat().st_size for path in (self._data / "models").rglob("*") if path.is_file())

    def _start(self, grpc_port: str, http_port: str) -> None:
        ports = ["--grpc-port", grpc_port, "--http-port", http_port]
        self._processes.start(
            self.name, ["deltasync", "serve", "--data-dir", str(self._data), *ports, *self._arguments]
        )

    def _await_endpoints(self) -> Path:
        endpoints, deadline = self._data / "endpoints.json", time.monotonic() + _START_SECONDS
        while not endpoints.exists():
            if not self._processes.running(self.name) or time.monotonic() > deadline:
                raise DemoFailed(f"the service does not listen; its log:\n{self._processes.tail(self.name)}")
            time.sleep(_POLL_SECONDS)
        return endpoints
