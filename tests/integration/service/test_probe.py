"""The service's own probe: a row that goes all the way, again and again."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.command import deltasync
from tests.support.metrics import samples_of
from tests.support.server import RunningService

from deltasync.api.server_options import ServerOptions
from deltasync.cli.probe import Probe
from deltasync.client import Endpoint
from deltasync.core.probe_status import ProbeStatus

_DEADLINE_SECONDS = 30.0


def probe(address: str, status: ProbeStatus, seconds: float = 0.05) -> Probe:
    return Probe(Endpoint(address), seconds, status)


class ProbedService(RunningService):
    """A service that probes itself."""

    def __init__(self, data_dir: Path, begin: Callable[[str, ProbeStatus], Probe] = probe) -> None:
        super().__init__(data_dir)
        self.options = ServerOptions(**{**vars(self.options), "probe": begin})

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            found: dict[str, Any] | None = self.get_json("/status")["processes"][0]["probe"]
            if found and wanted(found):  # It begins once the service has been announced.
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.01)


def test_a_row_goes_all_the_way_while_nobody_else_publishes(tmp_path: Path) -> None:
    with ProbedService(tmp_path / "data") as service:
        found = service.wait_for(lambda probe: probe["turns"] > 2)
        assert 0 < found["seconds"] < _DEADLINE_SECONDS
        assert (found["failures"], found["trouble"]) == (0, "")
        samples = samples_of(service)
        assert samples["deltasync_probe_seconds", ()] > 0
        assert samples["deltasync_probe_failures_total", ()] == 0
        assert samples["deltasync_freshness_seconds_count", (("consumer", "deltasync-probe"),)] >= 2
        assert "from a publisher to a replica" in deltasync("status", "--service", service.http)[1]
    with ProbedService(tmp_path / "data") as service:
        service.wait_for(lambda probe: probe["turns"] > 2)  # A later run goes on.


def test_a_probe_that_is_kept_from_it_says_why_and_goes_on(tmp_path: Path) -> None:
    with ProbedService(tmp_path / "data") as service:
        service.wait_for(lambda probe: probe["turns"] > 0)
        at, token = ("--service", service.grpc), "secret"
        paused = deltasync("consumers", "pause", "deltasync-probe", *at, admin_token=token)
        assert paused[0] == 0, paused
        service.wait_for(lambda probe: "was not read back" in str(probe["trouble"]))
        assert samples_of(service)["deltasync_probe_failures_total", ()] >= 1
        deltasync("consumers", "resume", "deltasync-probe", *at, admin_token=token)
        service.wait_for(lambda probe: probe["trouble"] == "")


def test_a_service_ends_although_its_probe_waits(tmp_path: Path) -> None:
    slow = partial(probe, seconds=3600.0)
    with ProbedService(tmp_path / "data", slow) as service:
        service.wait_for(lambda probe: probe["turns"] == 1)


def test_a_guarded_service_asks_for_the_rights_of_its_probe(tmp_path: Path) -> None:
    (tmp_path / "roles.toml").write_text("")
    roles = ["--roles", str(tmp_path / "roles.toml"), "--data-dir", str(tmp_path / "data")]
    code, _, said = deltasync("serve", "--probe-seconds", "1", *roles)
    assert (code, "--probe-endpoint" in said) == (2, True)
