"""The service as the deployments start it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.programs import killed

START = "from deltasync.cli.main import main; main()"


@pytest.fixture
def service(root: Path, deploy: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process with the configuration of the StatefulSet, on free ports, and its HTTP address."""
    place = {"HOST": "127.0.0.1", "DATA_DIR": str(tmp_path), "GRPC_PORT": "0", "HTTP_PORT": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", START, "serve", "--config", deploy / "kubernetes/deltasync.toml"],
        cwd=root,
        env=os.environ | {f"DELTASYNC_{name}": value for name, value in place.items()},
    )
    endpoints = tmp_path / "endpoints.json"
    with killed(process):
        while not endpoints.exists():
            assert process.poll() is None, "the service has ended"
            time.sleep(0.05)
        yield process, json.loads(endpoints.read_text())["http"]


_HISTOGRAM = ("_bucket", "_count", "_sum")


def _get(url: str) -> str:
    return httpx.get(url, timeout=10).raise_for_status().text


def test_service_starts_with_the_configuration_and_ends_on_sigterm(
    service: tuple[subprocess.Popen[bytes], str], manifests: list[dict[str, Any]]
) -> None:
    process, http = service
    (stateful,) = [doc for doc in manifests if doc["kind"] == "StatefulSet"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    for kind in ("startup", "liveness", "readiness"):
        _get(http + container[f"{kind}Probe"]["httpGet"]["path"])
    found = {line["consumer"] for line in json.loads(_get(f"{http}/consumers"))}
    assert "predictors" in found <= {"predictors", "deltasync-probe"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_metrics_are_those_the_alerts_and_the_dashboard_know(
    service: tuple[subprocess.Popen[bytes], str], metrics: dict[str, set[str]]
) -> None:
    exposition = _get(f"{service[1]}/metrics")
    families = re.findall(r"(?m)^# TYPE (deltasync_\w+) (\w+)", exposition)
    samples = {name + end for name, kind in families for end in (_HISTOGRAM if kind == "histogram" else ("",))}
    assert samples == metrics.keys()
    labelled = re.findall(r"(?m)^(\w+)\{(.*)\} ", exposition)
    assert labelled
    for name, labels in labelled:
        assert set(re.findall(r'(\w+)="', labels)) == metrics[name]
