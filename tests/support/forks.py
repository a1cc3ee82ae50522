"""Starts Python programs as forks of a process with its imports done, which saves 2 s to 3 s per program.

`python -m tests.support.forks FD MODULE...` is that process: it imports the modules, and forks a child for each
program that it is told to run over a socket.
"""

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.programs import ROOT, cleaned

# What the interpreter and libraries look at before there is a program.
AT_START = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_MOST_BYTES = 1 << 20
_ENDING_SECONDS = 10.0


class Nursery:
    """Starts programs that need certain modules, which a parent imports once in `environment`."""

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        self._lock, self._requests = threading.Lock(), 0
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-m", "tests.support.forks", str(other.fileno()), *modules]
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        atexit.register(self._close)

    def start(
        self, *arguments: str, environment: Mapping[str, str], folder: str, out: int = 1, err: int = 2
    ) -> "Fork":
        """Start `python ARGUMENTS` in a new session, with a working folder and given outputs."""
        request = {"arguments": arguments, "environment": dict(environment), "folder": folder}
        return Fork(self, self._ask(request, out, err))

    def status_of(self, pid: int) -> int:
        """The exit status of an ended program, as `subprocess` gives it. Call it once."""
        return self._ask({"ended": pid})

    def _ask(self, request: Mapping[str, Any], *descriptors: int) -> int:
        with self._lock:
            self._requests += 1
            said = json.dumps({"number": self._requests, **request}).encode()
            socket.send_fds(self._socket, [said], descriptors)
            while said := self._socket.recv(_MOST_BYTES):
                number, answer = json.loads(said)
                if number == self._requests:  # Who asked before may have been interrupted.
                    return int(answer)
        raise ChildProcessError("the process that starts others has ended")

    def _close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Fork:
    """A running program, with the methods of `subprocess.Popen`.

    Attributes:
        returncode: the exit status, as of the last poll. None = not known yet.
    """

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self._descriptor, self._lock = os.pidfd_open(pid), threading.Lock()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit status."""
        status = self._ended_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal if the program still runs."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Kill everything in the program's session."""
        self.kill()
        self.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if poll.poll(None if seconds is None else seconds * 1000):
                self._note_end()
        return self.returncode

    def _note_end(self) -> None:
        with self._lock:
            if self.returncode is None:
                self.returncode = self._nursery.status_of(self.pid)
                os.close(self._descriptor)


@dataclass(frozen=True)
class Program:
    """A fork whose output is captured, with the methods of `subprocess.Popen`."""

    fork: Fork
    output: Path

    @property
    def returncode(self) -> int | None:
        """The exit status, as of the last poll. None = not known yet."""
        return self.fork.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the end; returns the output."""
        try:
            self.fork.wait(timeout)
        except subprocess.TimeoutExpired as error:
            error.output = self.output.read_text(errors="replace")
            raise
        return self.output.read_text(errors="replace"), ""

    def kill(self) -> None:
        self.fork.kill()


@contextmanager
def forked(*arguments: str, environment: Mapping[str, str]) -> Iterator[Program]:
    """Run `python ARGUMENTS`, which needs TorchRec; ended with the block."""
    with tempfile.NamedTemporaryFile() as output:
        said = output.fileno()
        settings = cleaned() | dict(environment)
        fork = _torchrec().start(*arguments, environment=settings, folder=str(ROOT), out=said, err=said)
        try:
            yield Program(fork, Path(output.name))
        finally:
            fork.end()


@cache
def _torchrec() -> Nursery:
    """Our own modules are imported by each program itself."""
    return Nursery("tensordict", "torchrec", environment=os.environ | AT_START)


@cache
def services() -> Nursery:
    """The nursery for services: imports the current package and its compiled kernels."""
    return Nursery("tests.support.service_start", environment=cleaned())


def _bear(channel: socket.socket) -> Sequence[str]:
    """Serve the other end of a socket; returns in each forked program, with its arguments."""
    running = set[int]()  # Which do not outlive it.
    while True:
        said, descriptors, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
        if not said:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        request = json.loads(said)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], 0)
            running.remove(pid)
            answer = os.waitstatus_to_exitcode(status)
        elif answer := os.fork():
            running.add(answer)
        else:
            channel.close()
            _settle(request["environment"], request["folder"], descriptors)
            arguments: Sequence[str] = request["arguments"]
            return arguments
        for each in descriptors:
            os.close(each)
        channel.send(json.dumps([request["number"], answer]).encode())


def _settle(environment: Mapping[str, str], folder: str, descriptors: Sequence[int]) -> None:
    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ours, wanted in zip(descriptors, (1, 2), strict=True):
        os.dup2(ours, wanted)
        os.close(ours)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if seed := environment.get("STRESS_SEED"):
        from tests.support.stress import provoke  # It imports pytest, which programs do without otherwise.

        provoke(f"{seed} {folder}")


def _run(first: str, *rest: str) -> None:
    if first == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # So that no program copies the pages of these modules to mark what is in them.
    _run(*_bear(socket.socket(fileno=int(sys.argv[1]))))
