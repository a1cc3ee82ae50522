"""Runs programs, and ends everything that they have started."""

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
    """Run a program to its end; returns status and output. If it hangs, the test fails."""
    with started(*command, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=LONGEST_SECONDS)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextmanager
def started(
    *command: str, stderr: int = subprocess.STDOUT, environment: Mapping[str, str] | None = None
) -> "Iterator[subprocess.Popen[str]]":
    """Start a program in a new session, in this repository's folder; ended with the block."""
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
    """Kill a process at the end of the block, and close its pipes."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def cleaned() -> dict[str, str]:
    """The environment without DELTASYNC_ settings, except the log format that tests expect."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("DELTASYNC_") or name == "DELTASYNC_LOG_FORMAT"
    }


def _end(process: "subprocess.Popen[str]") -> None:
    """Send SIGTERM first, for cleanup: torchrun's ranks are in other sessions."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CLEANING_UP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
