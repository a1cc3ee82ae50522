"""The configuration at a start, and on SIGHUP, which never ends the service: what does not fit is said."""

import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.fleet import WAIT, Trainer, follow
from tests.support.forks import Fork
from tests.support.process import ServiceProcess

from deltasync.client import NumpyTarget

FIRST = """
keep_last = 3
[consumers.one]
model = "clicks"
[consumers.two]
model = "clicks"
top_k = 3
"""
SECOND = """
keep_last = 4
drain_seconds = 2
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
    "no-toml": ("[consumers", "configuration refused: nothing changed: .*deltasync.toml: "),
    "unknown-setting": ("colour = 1", "configuration refused: .*unknown setting 'colour'"),
    "gone": (None, "configuration refused: nothing changed: .*No such file"),
    "unknown-key": (FIRST + "colour = 1", r"configuration refused: .*\[consumers.two\]: .*'colour'"),
}


def logged(folder: Path, *arguments: str) -> ServiceProcess:
    return ServiceProcess(folder / "data", *arguments, log=folder / "service.log")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "deltasync.toml"
    path.write_text(FIRST)
    return path


def test_what_has_changed_is_taken_over_and_said(tmp_path: Path, config: Path) -> None:
    with logged(tmp_path, "--config", str(config)) as service:
        config.write_text(SECOND)
        service.send_signal(signal.SIGHUP)
        line = service.wait_for_line("configuration reloaded: ")
        assert "limit streams: 7, was 1000; limit message_bytes: 5000000 after the next start; created" in line
        assert "created: three; changed: two; refused: one; after the next start: keep_last, drain_seconds" in line
        assert service.terminate() == 0


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_an_error_in_the_file_changes_nothing(tmp_path: Path, config: Path, text: str | None, said: str) -> None:
    with logged(tmp_path, "--config", str(config)) as service:
        config.unlink() if text is None else config.write_text(text)
        service.send_signal(signal.SIGHUP)
        service.wait_for_line(said)
        config.write_text(FIRST)
        service.send_signal(signal.SIGHUP)
        assert "reloaded: unchanged: one, two" in service.wait_for_line("configuration reloaded: ")
        assert service.terminate() == 0


def test_without_a_file_it_says_so(tmp_path: Path) -> None:
    with logged(tmp_path) as service:
        service.send_signal(signal.SIGHUP)
        service.wait_for_line("configuration reloaded: no configuration file; start the service with --config")
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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ('[consumers.mobile]\nmodel = "other"\n', "consumer 'mobile' exists for model 'clicks': delete it first"),
        ('[consumers.mobile]\nmodel = "clicks"\ntables = ["gone"]\n', "tables gone: no table of the model match"),
    ],
)
def test_a_consumer_that_cannot_be_as_configured_stays_and_says_so(
    tmp_path: Path, config: Path, changed: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data, target = tmp_path / "data", NumpyTarget()
    config.write_text('[consumers.mobile]\nmodel = "clicks"\n')
    with ServiceProcess(data, "--config", str(config)) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        held = trainer.expected()
        assert service.terminate() == 0
    capfd.readouterr()
    config.write_text(changed + '[consumers.new]\nmodel = "clicks"\n')
    with ServiceProcess(data, "--config", str(config)) as service:
        for name in ("mobile", "new"):
            with follow(service, name, "p", target) as replica:
                replica.wait_for(1, WAIT)
            assert {name: rows.tobytes() for name, rows in target.tables.items()} == held
        status, ready = service.get("/readyz")
        assert (status, ready.splitlines()[0]) == (200, "ok")
        assert "consumer 'mobile': its configuration was refused" in ready
        assert said in ready
        assert said in service.get_json("/consumers/mobile")["reason"]
        assert said not in service.get_json("/consumers/new")["reason"]
        assert service.terminate() == 0
    assert "failed: consumer=mobile its configuration was refused" in capfd.readouterr().err
