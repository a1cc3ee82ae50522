"""8. Processes on loopback that end together; one of them is the service."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from deltasync.client import DeltasyncError

_START_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 60.0, 60.0, 0.02
_TAIL_LINES = 20


class DemoFailed(DeltasyncError):
    """A process of the demo failed or timed out, or its results are wrong."""


class Processes:
    """Named child processes, each with a log file in a folder. They end at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `python -m ARGUMENTS`, with its output in NAME.log."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DELTASYNC_")}
        # Text logs, because users read them if something fails. One thread each, for more processes than cores.
        environment |= {"DELTASYNC_LOG_FORMAT": "text", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONUNBUFFERED": "1", "no_proxy": "127.0.0.1,localhost"}
        command = [sys.executable, "-m", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            # Use a new process group: Ctrl-C must only reach the parent, which then ends the process.
            self._running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
            )

    def tail(self, name: str) -> str:
        """The last lines of the process's log."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def pid(self, name: str) -> int:
        """The process id."""
        return self._running[name].pid

    def status(self, name: str) -> int | None:
        """The exit status of the process; None while it runs."""
        return self._running[name].poll()

    def running(self, name: str) -> bool:
        """Whether the process runs; DemoFailed if it ended with a status other than 0."""
        if status := self.status(name):
            raise DemoFailed(f"{name} ended with status {status}; the end of its log:\n{self.tail(name)}")
        return self.status(name) is None

    def stop(self, name: str) -> None:
        """Ask the process to end, even if it is stopped, and wait; DemoFailed unless it exits with 0 in time."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._running[name].send_signal(number)
        try:
            self._running[name].wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{name} did not end within {_STOP_SECONDS:.0f} s of SIGTERM") from None
        self.running(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class DemoService:
    """The sync service: `grpc` is HOST:PORT for trainers and replicas, `http` the URL for operators."""

    def __init__(self, processes: Processes, arguments: Sequence[str]) -> None:
        from deltasync.kernels.compiled import warm

        self.data_dir = processes.folder / "data-service"
        warm()  # Compile here, once for all processes, because the service would only listen after compiling.
        listen = ["--data-dir", str(self.data_dir), "--grpc-port", "0", "--http-port", "0"]
        processes.start("service", ["deltasync", "serve", *listen, *arguments])
        self.pid = processes.pid("service")
        endpoints, deadline = self.data_dir / "endpoints.json", time.monotonic() + _START_SECONDS
        while not endpoints.exists():
            if not processes.running("service") or time.monotonic() > deadline:
                raise DemoFailed(f"the service did not start; the end of its log:\n{processes.tail('service')}")
            time.sleep(_POLL_SECONDS)
        addresses = json.loads(endpoints.read_text())
        self.grpc, self.http = addresses["grpc"], addresses["http"]
