import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

Stages = dict[str, list[tuple[str, str]]]


class _Probed(BaseHTTPRequestHandler):
    """Answers one path, and everything else with 503."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == self.server.healthy else 503)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def probed() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Probed) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _probe(command: list[str], port: int) -> int:
    assert command[0] == "python"
    code = command[-1].replace(":8080/", f":{port}/")
    env = os.environ | {"DELTASYNC_HTTP_PORT": str(port)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True).returncode


def _install_lines(stage: list[tuple[str, str]]) -> list[str]:
    return [rest for word, rest in stage if word == "RUN" and "pip install" in rest]


def test_hadolint_finds_nothing(deploy: Path, tool: Callable[[str], str]) -> None:
    done = subprocess.run([tool("hadolint"), deploy / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", ["/livez", "/ready"], ids=["image", "predictor"])
def test_health_checks_ask_one_path(
    stages: Stages, compose: dict[str, Any], probed: ThreadingHTTPServer, path: str
) -> None:
    kind, *command = compose["services"]["predictor-1"]["healthcheck"]["test"]
    assert kind == "CMD"
    if path == "/livez":
        check = next(rest for word, rest in stages["service"] if word == "HEALTHCHECK")
        command = json.loads(check.split("CMD", 1)[1])
    for healthy in (path, None):
        probed.healthy = healthy  # type: ignore[attr-defined]
        assert (_probe(command, probed.server_port) == 0) is bool(healthy)


@pytest.mark.parametrize("target", ["service", "trainer"])
def test_images_run_as_one_numbered_user(stages: Stages, target: str) -> None:
    user = [rest for word, rest in stages[target] if word == "USER"][-1]
    created = next(rest for _, rest in stages[target] if "useradd" in rest)
    assert re.search(r"--uid (\d+)", created)[1] == user.split(":")[0]  # type: ignore[index]


def test_service_owns_its_data_folder(stages: Stages) -> None:
    stage = stages["service"]
    volume = next(rest for word, rest in stage if word == "VOLUME")
    assert any(f"DELTASYNC_DATA_DIR={volume}" in rest for word, rest in stage if word == "ENV")
    user = [rest for word, rest in stage if word == "USER"][-1].split(":")
    made = next(rest for _, rest in stage if "install --directory" in rest)
    assert f"--owner {user[0]} --group {user[1]}" in made
    assert made.endswith(f" {volume}")


@pytest.mark.parametrize("target", ["wheel", "service", "trainer"])
def test_images_install_what_locks_name_by_its_hash_and_nothing_else(
    root: Path, stages: Stages, target: str
) -> None:
    arguments = dict(rest.split("=") for word, rest in stages[target] if word == "ARG" and "=" in rest)
    locks = []
    for line in _install_lines(stages[target]):
        for install in [part for part in line.split("&&") if "pip install" in part]:
            if "/wheels/" in install:
                assert "--no-deps" in install
                continue
            assert "--no-deps --require-hashes" in install
            locks += re.findall(r"--requirement \"?/?(?:deploy/)?locks/([^\s\"]+)", install)
    found = [re.sub(r"\$\{(\w+)\}", lambda name: arguments[name[1]], lock) for lock in locks]
    wanted = {"wheel": "build", "service": "service", "trainer": "torch-cuda trainer fbgemm-gpu"}[target]
    assert found == [f"{name}.lock" for name in wanted.split()]
    assert all((root / "deploy/locks" / lock).is_file() for lock in found)


def test_compose_builds_with_locks_that_exist(root: Path, compose: dict[str, Any]) -> None:
    arguments = [service["build"].get("args", {}) for service in compose["services"].values()]
    named = {value for each in arguments for name, value in each.items() if name in ("TORCH", "FBGEMM")}
    assert named
    assert all((root / f"deploy/locks/{name}.lock").is_file() for name in named)


def _ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves the path out: the last pattern for it or a folder above it decides."""
    parts = path.split("/")
    above = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        plain = pattern.removeprefix("!")
        names = parts if plain.startswith("**/") else above
        if any(fnmatch(name, plain.removeprefix("**/")) for name in names):
            ignored = plain == pattern
    return ignored


def test_context_holds_what_the_build_needs_and_little_else(
    root: Path, project: dict[str, Any], stages: Stages
) -> None:
    patterns = (root / ".dockerignore").read_text().split()
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {f"{package}/x.py" for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    for word, rest in (*stages["service"], *stages["trainer"]):
        needed |= set(rest.split()[:-1]) if word == "COPY" else set()
    assert "deploy/locks/service.lock" in needed
    assert not {path for path in needed if _ignored(path, patterns)}
    unwanted = {
        ".git/config",
        ".venv/bin/python",
        "tests/x.py",
        "trainer/__pycache__/x.pyc",
        "deploy/compose.yaml",
    }
    assert not {path for path in unwanted if not _ignored(path, patterns)}
