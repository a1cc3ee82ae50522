"""Prometheus and Grafana in compose: what the file says, and a real Prometheus with it beside a real service."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.deployments import compose_configs, compose_file, deployed, run_access
from tests.support.ports import free_ports
from tests.support.programs import killed

Doc = dict[str, Any]

_WAIT = 60.0


@pytest.fixture(scope="module")
def monitoring(deploy: Path) -> Doc:
    return compose_file(deploy / "compose.monitoring.yaml")


@pytest.fixture(scope="module")
def scraped(deploy: Path) -> Doc:
    return dict(yaml.safe_load((deploy / "prometheus/compose.yml").read_text()))


def test_files_volumes_and_services_are_there(deploy: Path, compose: Doc, monitoring: Doc) -> None:
    assert all((deploy / each["file"]).is_file() for each in monitoring["configs"].values())
    configs = compose["configs"].keys() | monitoring["configs"].keys()
    known = compose["volumes"].keys() | monitoring["volumes"].keys()
    for name, service in monitoring["services"].items():
        assert {mount.split(":")[0] for mount in service.get("volumes", [])} <= known
        assert {each["source"] for each in service.get("configs", [])} <= configs
        assert service["depends_on"].keys() <= monitoring["services"].keys() | compose["services"].keys(), name


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cluster.yaml"])
def test_all_processes_of_the_service_are_scraped(deploy: Path, monitoring: Doc, scraped: Doc, name: str) -> None:
    """Of whichever file is beside that of Prometheus: each owns models, and says of no others how they are."""
    document, (job, *_) = compose_file(deploy / name), scraped["scrape_configs"]
    (given,) = [each for each in monitoring["services"]["prometheus"]["configs"] if each["source"] == "processes"]
    assert job["file_sd_configs"] == [{"files": [Path(given["target"]).name]}]
    # That of the second file counts where there is one, in whichever order the three come.
    assert "processes" not in monitoring["configs"]
    (targets,) = yaml.safe_load((deploy / document["configs"]["processes"]["file"]).read_text())
    processes = [each for each in document["services"] if re.fullmatch(r"service(-\d)?", each)]
    assert targets == {"targets": [f"{each}:8080" for each in processes]}


def test_all_else_that_compose_starts_is_scraped(compose: Doc, scraped: Doc) -> None:
    job, *others = scraped["scrape_configs"]
    targets = {each["job_name"]: each["static_configs"][0]["targets"] for each in others}
    predictors = [f"{name}:8080" for name in compose["services"] if name.startswith("predictor-")]
    (metrics,) = [each for each in compose["services"]["trainer"]["command"] if each.startswith("--metrics=")]
    (ranks,) = [each for each in compose["services"]["trainer"]["command"] if each.startswith("--nproc-per-node=")]
    first, count = int(metrics.rpartition(":")[2]), int(ranks.rpartition("=")[2])
    trainers = [f"trainer:{first + rank}" for rank in range(count)]
    assert targets == {"predictors": predictors, "trainers": trainers}
    assert job["job_name"] == "deltasync"


def test_grafana_finds_the_dashboard_and_asks_prometheus(deploy: Path, monitoring: Doc) -> None:
    grafana, prometheus = (monitoring["services"][name] for name in ("grafana", "prometheus"))
    mounted = {
        each["target"]: deploy / monitoring["configs"][each["source"]]["file"] for each in grafana["configs"]
    }
    folder = "/etc/grafana/provisioning"
    (source,) = yaml.safe_load(mounted[f"{folder}/datasources/deltasync.yaml"].read_text())["datasources"]
    (provider,) = yaml.safe_load(mounted[f"{folder}/dashboards/deltasync.yaml"].read_text())["providers"]
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in prometheus["ports"]
    dashboard = json.loads(mounted[provider["options"]["path"]].read_text())
    assert dashboard["uid"] == "deltasync"
    (variable,) = [each for each in dashboard["templating"]["list"] if each["type"] == "datasource"]
    assert variable["query"] == source["type"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == provider["options"]["path"]


@pytest.mark.nightly
def test_a_real_prometheus_reads_the_service_with_the_token_that_is_made(
    deploy: Path, compose: Doc, monitoring: Doc, tool: Callable[[str], str], tmp_path: Path
) -> None:
    program = tool("prometheus")
    root = run_access([compose["services"]["access"], monitoring["services"]["monitoring-access"]], tmp_path)
    before = (root / "prometheus/token").read_bytes()
    run_access([monitoring["services"]["monitoring-access"]], tmp_path)
    assert (root / "prometheus/token").read_bytes() == before != b""

    folder, (port,) = tmp_path / "prometheus", free_ports(1)
    shutil.copytree(deploy / "prometheus", folder)
    shutil.copytree(root / "prometheus", folder / "access")
    own = compose["services"]["service"]
    given = compose_configs(deploy / "compose.yaml", own, tmp_path / "given")
    places = {"/run/deltasync": root / "service", "/etc/deltasync": given}
    with deployed(own["command"], own["environment"], tmp_path / "data", places) as service:
        for name, there, here in (
            ("processes.yml", '"service:8080"', f'"localhost:{service.http}"'),
            ("compose.yml", "scrape_interval: 5s", "scrape_interval: 1s"),
        ):
            (folder / name).write_text((folder / name).read_text().replace(there, here))
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'compose.yml'}",
                f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )
        with killed(process):
            (up,) = answer(process, port, 'up{job="deltasync"} == 1')
            assert up["metric"]["instance"] == f"localhost:{service.http}"
            assert answer(process, port, "deltasync_build_info")


def answer(process: "subprocess.Popen[bytes]", port: int, expression: str) -> list[Any]:
    """What Prometheus says, once it says something."""
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    opener, deadline = urllib.request.build_opener(urllib.request.ProxyHandler({})), time.monotonic() + _WAIT
    while True:
        assert process.poll() is None, "Prometheus has ended"
        assert time.monotonic() < deadline, expression
        try:
            found: list[Any] = json.loads(opener.open(url, timeout=5).read())["data"]["result"]
        except OSError:
            found = []
        if found:
            return found
        time.sleep(0.1)
