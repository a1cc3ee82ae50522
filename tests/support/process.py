"""A real service process, which a test may kill and restart."""

import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Self

from tests.support.forks import Fork, services
from tests.support.http import HttpStatus
from tests.support.ports import free_ports
from tests.support.programs import cleaned
from tests.support.waiting import wait_for

_DEADLINE_SECONDS = 30.0
_WITH_ANOTHER_CLOCK = """
import runpy, time
right = time.time_ns
time.time_ns = lambda: right() + {ahead_seconds} * 10**9
time.time = lambda: time.time_ns() / 1e9
runpy.run_module("deltasync", run_name="__main__")
"""


ADMIN_TOKEN = "secret"  # noqa: S105


class ServiceProcess(HttpStatus):
    """`deltasync serve` on free ports, which stay the same over restarts.

    Its admin token is `ADMIN_TOKEN`. `files` limits its open files, `log` is a file for its log, and `environment`
    has additional variables. `started_by` is a command that starts it. It is a fork of a process with its imports
    done unless it is `fresh`; only a fresh process obeys variables that the system reads at start.

    Attributes:
        ahead_seconds: how far its clock is ahead of this process's, from its next start on.
    """

    def __init__(
        self,
        data_dir: Path,
        *arguments: str,
        files: int = 0,
        fresh: bool = False,
        log: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        started_by: Sequence[str] = (),
    ) -> None:
        self.fresh = fresh
        self.data_dir = data_dir
        self.log = log
        self.ahead_seconds = 0
        self.program = ["-m", "deltasync"]
        self._environment = cleaned() | {"DELTASYNC_ADMIN_TOKEN": ADMIN_TOKEN} | dict(environment)
        self.arguments = arguments
        self._started_by = [*started_by, *(["prlimit", f"--nofile={files}"] if files else [])]
        self._ports = tuple(map(str, free_ports(2)))
        self.process: subprocess.Popen[bytes] | Fork | None = None

    def start(self, *, announced: bool = True, largest_file: int | None = None) -> None:
        """Start the process, and wait until it announces where it listens.

        With `announced=False` it does not wait; use `wait_for_answer`. `largest_file` limits the size in bytes of
        each file that it writes; `largest_file_is` changes the limit.
        """
        with suppress(IsADirectoryError):
            (self.data_dir / "endpoints.json").unlink(missing_ok=True)
        limit = [] if largest_file is None else ["prlimit", f"--fsize={largest_file}:"]
        with self.log.open("ab") if self.log else nullcontext() as log:
            self.process = self._started([*limit, *self._command()], log.fileno() if log else 2)
        if announced:
            self.wait_until_announced()

    def _started(self, command: Sequence[str], err: int = 2) -> "subprocess.Popen[bytes] | Fork":
        if self.fresh or command[:3] != [sys.executable, "-m", "deltasync"]:
            return subprocess.Popen(command, env=self._environment, stderr=err)
        return services().start(*command[1:], environment=self._environment, folder=str(Path.cwd()), err=err)

    def wait_until_announced(self) -> None:
        """Wait until the process announces where it listens."""
        endpoints = self.data_dir / "endpoints.json"
        wait_for(lambda: self._has_begun(endpoints), "the service did not listen in time")
        found = json.loads(endpoints.read_text())
        self.grpc, self.http = found["grpc"], found["http"]
        self._ports = (self.grpc.rpartition(":")[2], self.http.rpartition(":")[2])

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process
        self.process.send_signal(number)

    def lines(self, pattern: str) -> list[str]:
        """The lines of the log that contain a text."""
        assert self.log
        return [line for line in self.log.read_text().splitlines() if re.search(pattern, line)]

    def wait_for_line(self, pattern: str) -> str:
        assert self.log
        return wait_for(lambda: self.lines(pattern), self.log.read_text)[0]

    def largest_file_is(self, size: int) -> None:
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def run_to_end(self) -> "subprocess.CompletedProcess[str]":
        """Run a service that should fail to start."""
        with tempfile.TemporaryFile("w+") as said:
            process = self._started(self._command(), said.fileno())
            try:
                status = process.wait(_DEADLINE_SECONDS)
            finally:
                process.kill()
            said.seek(0)
            return subprocess.CompletedProcess(self._command(), status, stderr=said.read())

    def _command(self) -> list[str]:
        grpc_port, http_port = self._ports
        clock = ["-c", _WITH_ANOTHER_CLOCK.format(ahead_seconds=self.ahead_seconds)]
        program = clock if self.ahead_seconds else self.program
        command = [sys.executable, *program, "serve", "--data-dir", str(self.data_dir)]
        return [*self._started_by, *command, "--grpc-port", grpc_port, "--http-port", http_port, *self.arguments]

    def _has_begun(self, endpoints: Path) -> bool:
        assert self.process
        begun = endpoints.exists()
        assert begun or self.process.poll() is None, "the service ended before it listened"
        return begun

    def wait_for_answer(self) -> None:
        """Wait until it answers HTTP at its earlier address."""
        wait_for(self._answers, "the service did not answer in time")

    def _answers(self) -> bool:
        with suppress(urllib.error.URLError):
            return bool(self.get("/livez"))
        return False

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process
        self.send_signal(signal.SIGTERM)
        return self.process.wait(_DEADLINE_SECONDS)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:
            self.kill()


def environment() -> dict[str, str]:
    """The process's environment, without DELTASYNC_ settings of this one."""
    return cleaned()
