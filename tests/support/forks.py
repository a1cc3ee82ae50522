"""Python programs as forks of a process that has imported TorchRec, which takes 3 s of a core each time.

Our own modules are imported by each program itself.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
from tests.support.programs import ROOT, cleaned

# What the interpreter and libraries look at before there is a program.
AT_START = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


class Fork:
    """A program that was started, with the methods of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        self._output = output
        self._process = _server().Process(target=_run, args=(arguments, environment, output))
        self._process.start()
        assert self._process.pid
        self._pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it has ended. None = not yet."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has said until its end."""
        self._process.join(timeout)
        said = self._output.read_text(errors="replace")
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout, said)
        return said, ""

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def end(self) -> None:
        """End what it has left behind, too."""
        self.kill()
        self._process.join()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


@contextmanager
def forked(*arguments: str, environment: Mapping[str, str]) -> Iterator[Fork]:
    """`python ARGUMENTS` in a session of its own, from this repository's folder; ended when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        process = Fork(arguments, cleaned() | dict(environment), Path(folder, "output"))
        try:
            yield process
        finally:
            process.end()


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensordict", "torchrec"])
    before = {name: os.environ.get(name) for name in AT_START}
    os.environ.update(AT_START)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _run(arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    os.setsid()
    os.chdir(ROOT)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    np.random.seed()
    _run_program(*arguments)


def _run_program(first: str, *rest: str) -> None:
    if first == "-m":
        sys.path.insert(0, str(ROOT))
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(first).parent))
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")
