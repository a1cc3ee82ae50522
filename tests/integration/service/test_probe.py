"""The service's own probe: a row that goes all the way, again and again."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.cluster import Cluster
from tests.support.command import deltasync
from tests.support.fleet import admin_of
from tests.support.metrics import samples_of
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from tests.support.waiting import wait_for

from deltasync.access.limits import LimitOptions
from deltasync.cli.probe import Probe
from deltasync.client import Endpoint
from deltasync.service.consumers import PROBE, ProbeStatus

_DEADLINE_SECONDS = 30.0


def probe(address: str, status: ProbeStatus, seconds: float = 0.05) -> Probe:
    return Probe(lambda: Endpoint(address), seconds, status)


class ProbedService(RunningService):
    """A service that probes itself."""

    def __init__(
        self, data_dir: Path, begin: Callable[[str, ProbeStatus], Probe] = probe, **settings: Any
    ) -> None:
        super().__init__(data_dir, **settings)
        self.start_probe = begin

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        def probe() -> dict[str, Any]:
            found: dict[str, Any] = self.get_json("/status")["processes"][0]["probe"]
            return found or {}  # It begins once the service has been announced.

        return wait_for(lambda: found if (found := probe()) and wanted(found) else {}, probe)


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


@pytest.mark.nightly
def test_a_probe_that_is_kept_from_it_says_why_and_goes_on(tmp_path: Path) -> None:
    with ProbedService(tmp_path / "data") as service:
        service.wait_for(lambda probe: probe["turns"] > 0)
        at, token = ("--service", service.http), "secret"
        paused = deltasync("consumers", "pause", "deltasync-probe", *at, admin_token=token)
        assert paused[0] == 0, paused
        service.wait_for(lambda probe: "was not read back" in str(probe["trouble"]))
        assert samples_of(service)["deltasync_probe_failures_total", ()] >= 1
        deltasync("consumers", "resume", "deltasync-probe", *at, admin_token=token)
        service.wait_for(lambda probe: probe["trouble"] == "")


@pytest.mark.nightly
def test_a_probe_whose_consumer_is_deleted_has_another_one(tmp_path: Path) -> None:
    with ProbedService(tmp_path / "data") as service:
        service.wait_for(lambda probe: probe["turns"] > 0)
        deleted = deltasync("consumers", "delete", PROBE, "--service", service.http, admin_token="secret")  # noqa: S106
        assert deleted[0] == 0, deleted
        failed = service.wait_for(lambda probe: probe["failures"] > 0)
        service.wait_for(lambda probe: probe["turns"] > failed["turns"] and not probe["trouble"])


def test_what_was_not_foreseen_does_not_end_a_probe(tmp_path: Path) -> None:
    broken = threading.Event()
    broken.set()

    class Broken(Probe):
        def _part(self, *arguments: Any) -> Any:
            return 1 // 0 if broken.is_set() else super()._part(*arguments)

    def begin(address: str, status: ProbeStatus) -> Probe:
        return Broken(lambda: Endpoint(address), 0.05, status)

    with ProbedService(tmp_path / "data", begin) as service:
        service.wait_for(lambda probe: "ZeroDivisionError" in probe["trouble"])
        broken.clear()
        service.wait_for(lambda probe: probe["turns"] > 0 and not probe["trouble"])


@pytest.mark.nightly
def test_what_keeps_a_probe_from_its_consumer_ends_no_service(tmp_path: Path) -> None:
    with ProbedService(tmp_path / "data", limits=LimitOptions(consumers=2)) as service:
        found = service.wait_for(lambda probe: "cannot be created" in probe["trouble"])
        assert "at most 2 are allowed" in found["trouble"]
        assert service.get("/readyz")[0] == 200
        admin_of(service).delete_consumer("probes")
        service.wait_for(lambda probe: probe["turns"] > 0 and not probe["trouble"])


def test_no_row_for_long_is_trouble_whatever_was_before() -> None:
    status = ProbeStatus(every_seconds=5.0)
    assert status.trouble == "no row has arrived yet"
    status.record(0.01)
    assert status.trouble == ""
    status.since_ns -= 16 * 10**9
    assert status.trouble == "no row has arrived for 16 s"
    status.record_failure("a row was not sealed in 10 s")
    assert status.trouble == "a row was not sealed in 10 s"


@pytest.mark.nightly
def test_of_several_processes_each_has_a_probe(tmp_path: Path) -> None:
    """Whichever of them has its model, which changes when one is killed."""
    with Cluster(tmp_path, services=2, brokers=1, arguments=("--probe-seconds", "0.2")) as cluster:
        _wait_for_probes(cluster.services)
        killed, left = cluster.services
        killed.kill()
        _wait_for_probes([left])
        killed.start()
        _wait_for_probes(cluster.services)


def _wait_for_probes(services: Sequence[ServiceProcess]) -> None:
    """Wait until the probe of each process has come back once more."""
    deadline = time.monotonic() + 3 * _DEADLINE_SECONDS
    first = dict[int, int]()
    while True:
        found = [service.get_json("/status")["processes"][0]["probe"] for service in services]
        going = {number: each["turns"] for number, each in enumerate(found) if each and not each["trouble"]}
        first = going | first
        if len(going) == len(services) and all(turns > first[number] for number, turns in going.items()):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_service_ends_although_its_probe_waits(tmp_path: Path) -> None:
    slow = partial(probe, seconds=3600.0)
    with ProbedService(tmp_path / "data", slow) as service:
        service.wait_for(lambda probe: probe["turns"] == 1)


def test_a_guarded_service_asks_for_the_rights_of_its_probe(tmp_path: Path) -> None:
    (tmp_path / "roles.toml").write_text("")
    roles = ["--roles", str(tmp_path / "roles.toml"), "--data-dir", str(tmp_path / "data")]
    code, _, said = deltasync("serve", "--probe-seconds", "1", *roles)
    assert (code, "--probe-endpoint" in said) == (2, True)
