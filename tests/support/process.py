"""A real service process that a test may kill and start again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.http import HttpStatus

_DEADLINE_SECONDS = 30.0
_WITH_SHARED_FILES = """
import runpy
from deltasync.storage import mapping
from deltasync.storage.private_memory import PrivateMemory
mapping.PRIVATE = PrivateMemory(0)
runpy.run_module("deltasync", run_name="__main__")
"""


class ServiceProcess(HttpStatus):
    """`deltasync serve` on free ports, which it keeps over restarts: of today, or of the package in `code`.

    Unless its tables are `private`, as if there were too little memory for that.
    """

    def __init__(self, data_dir: Path, *arguments: str, code: Path | None = None, private: bool = True) -> None:
        self.data_dir = data_dir
        self._program = ["-m", "deltasync"] if private else ["-c", _WITH_SHARED_FILES]
        self._environment = environment(code)
        self._arguments = arguments
        self._ports = ("0", "0")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        endpoints = self.data_dir / "endpoints.json"
        endpoints.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command(), env=self._environment)
        self._wait_for(endpoints)
        found = json.loads(endpoints.read_text())
        self.grpc, self.http = found["grpc"], found["http"]
        self._ports = (self.grpc.rpartition(":")[2], self.http.rpartition(":")[2])

    def run_to_end(self) -> "subprocess.CompletedProcess[str]":
        """Run a service that is expected not to start."""
        return subprocess.run(
            self._command(),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_DEADLINE_SECONDS,
        )

    def _command(self) -> list[str]:
        grpc_port, http_port = self._ports
        command = [sys.executable, *self._program, "serve", "--data-dir", str(self.data_dir)]
        return [*command, "--grpc-port", grpc_port, "--http-port", http_port, *self._arguments]

    def _wait_for(self, endpoints: Path) -> None:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not endpoints.exists():
            assert self.process
            assert self.process.poll() is None, "the service ended before it listened"
            assert time.monotonic() < deadline, "the service did not listen in time"
            time.sleep(0.01)

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_DEADLINE_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.process and self.process.poll() is None:
            self.kill()


def environment(code: Path | None = None) -> dict[str, str]:
    """What a process is started with: no settings of this one, and the package of today, or that in `code`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DELTASYNC_")}
    return kept | ({"PYTHONPATH": str(code)} if code else {})
