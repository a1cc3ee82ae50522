"""SIGHUP reads the consumers of the configuration again, and never ends the service."""

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.forks import Fork
from tests.support.process import ServiceProcess

FIRST = """
[consumers.one]
model = "clicks"
[consumers.two]
model = "clicks"
top_k = 3
"""
SECOND = """
[limits]
streams = 7
message_bytes = 5_000_000
[consumers.two]
model = "clicks"
top_k = 5
[consumers.three]
model = "clicks"
[consumers.one]
model = "other"
"""
WRONG = {
    "no-toml": ("[consumers", "configuration refused: nothing has changed: .*deltasync.toml: "),
    "unknown-setting": ("colour = 1", "configuration refused: .*unknown setting 'colour'"),
    "unknown-key": (FIRST + "colour = 1", r"configuration refused: .*\[consumers.two\]: .*'colour'"),
}


class Logged(ServiceProcess):
    """A service whose log can be read."""

    def start(self, *, announced: bool = True, largest_file: int | None = None) -> None:
        reading, writing = os.pipe()
        self.process = self._started(self._command(), writing)
        os.close(writing)
        self._log = os.fdopen(reading)
        self.until("listening")

    def until(self, pattern: str) -> str:
        for line in self._log:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"the service has ended without {pattern!r}")

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._log.close()

    def hang_up(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGHUP)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "deltasync.toml"
    path.write_text(FIRST)
    return path


def test_what_has_changed_is_taken_over_and_said(tmp_path: Path, config: Path) -> None:
    with Logged(tmp_path / "data", "--config", str(config)) as service:
        config.write_text(SECOND)
        service.hang_up()
        line = service.until("configuration reloaded: ")
        assert "limit streams: 7, was 1000; limit message_bytes: 5000000 from the next start on; made" in line
        assert "made: three; changed: two; refused: one; other settings are read at the next start" in line
        assert service.terminate() == 0


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_an_error_in_the_file_changes_nothing(tmp_path: Path, config: Path, text: str, said: str) -> None:
    with Logged(tmp_path / "data", "--config", str(config)) as service:
        config.write_text(text)
        service.hang_up()
        service.until(said)
        config.write_text(FIRST)
        service.hang_up()
        assert "reloaded: as before: one, two;" in service.until("configuration reloaded: ")
        assert service.terminate() == 0


def test_a_file_that_is_gone_changes_nothing(tmp_path: Path, config: Path) -> None:
    with Logged(tmp_path / "data", "--config", str(config)) as service:
        config.unlink()
        service.hang_up()
        service.until("configuration refused: nothing has changed: .*No such file")
        assert service.terminate() == 0


def test_without_a_file_it_says_so(tmp_path: Path) -> None:
    with Logged(tmp_path / "data") as service:
        service.hang_up()
        service.until("configuration reloaded: there is no file: start the service with --config")
        assert service.terminate() == 0


def test_it_does_not_end_a_service_that_is_ending(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as service:
        assert service.process
        service.process.send_signal(signal.SIGTERM)
        while not ended(service.process):
            service.process.send_signal(signal.SIGHUP)
        assert service.process.returncode == 0


def ended(process: subprocess.Popen[bytes] | Fork) -> bool:
    """Whether it ends within the moment between two signals: without one, it would do nothing but handle them."""
    try:
        process.wait(timeout=0.01)
    except subprocess.TimeoutExpired:
        return False
    return True
