"""Running programs to their end, and ending with them whatever they have started."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import AnyStr

ROOT = Path(__file__).parents[2]
# Not to measure anything: a program that hangs must not keep its test for ever.
LONGEST_SECONDS = 270.0
_CLEANING_UP_SECONDS = 10.0


def run_program(*command: str) -> "subprocess.CompletedProcess[str]":
    """Its status and what it said. One that hangs fails the test, and nothing of it is left."""
    with started(*command, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=LONGEST_SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def started(
    *command: str, stderr: int = subprocess.STDOUT, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[str]]":
    """A program in a session of its own, from this repository's folder; ended when the block ends."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=cleaned() | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end(process)


@contextmanager
def killed(process: "subprocess.Popen[AnyStr]") -> "Iterator[subprocess.Popen[AnyStr]]":
    """A process that is killed when the block ends, with its pipes closed, if it has not ended before."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def cleaned() -> dict[str, str]:
    """The environment without settings of ours, but for the form of lines that tests look for."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DELTASYNC_") or name == "DELTASYNC_LOG_FORMAT"
    }


def _end(process: "subprocess.Popen[str]") -> None:
    """By a signal that programs clean up on, first: torchrun's ranks are in sessions of their own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLEANING_UP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
