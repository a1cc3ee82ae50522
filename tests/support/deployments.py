"""Runs the service as a deployment does, with its command line, environment and files, on this machine."""

import os
import re
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from tests.support.ports import free_ports
from tests.support.programs import killed
from tests.support.waiting import wait_for

# Where every deployment has the service's settings, and the ports that it has there.
CONFIGURATION, PORTS = "/etc/deltasync", (50051, 8080)
_WAIT_SECONDS = 60.0
Secrets = dict[str, dict[str, Path]]
COMMAND = [sys.executable, "-c", "from deltasync.cli.main import main; main()"]


class _Compose(yaml.SafeLoader):
    """Also supports compose's `!override`, which replaces a list instead of extending it."""


def _list(loader: _Compose, node: yaml.SequenceNode) -> list[Any]:
    return list(loader.construct_sequence(node))


_Compose.add_constructor("!override", _list)


def compose_file(path: Path) -> dict[str, Any]:
    """Parse a compose file."""
    # Not an unsafe loader: it is SafeLoader with a list.
    return dict(yaml.load(path.read_text(), _Compose))  # noqa: S506


def compose_configs(file: Path, service: Mapping[str, Any], folder: Path) -> Path:
    """Copy the configuration folder of a compose service into a new folder."""
    documents = compose_file(file)["configs"]
    folder.mkdir()
    for each in service["configs"]:
        content = (file.parent / documents[each["source"]]["file"]).read_bytes()
        (folder / Path(each["target"]).relative_to(CONFIGURATION)).write_bytes(content)
    return folder


@dataclass(frozen=True)
class Deployed:
    """A running service, with the local folders for its deployment's paths."""

    process: "subprocess.Popen[bytes]"
    grpc: int
    http: int
    places: Mapping[str, Path]

    def here(self, text: str) -> str:
        return moved(text, self.places)


def moved(text: str, places: Mapping[str, Path]) -> str:
    """Replace a deployment's paths in a text by those on this machine, longest paths first."""
    for path in sorted(places, key=len, reverse=True):
        text = text.replace(path, str(places[path]))
    return text


def readme_lines(readme: Path, heading: str) -> list[str]:
    """The lines of the first shell block below a heading."""
    block = re.search(rf"(?s)## {heading}\n.*?```sh\n(.*?)```", readme.read_text())
    assert block
    return block[1].replace("\\\n", " ").splitlines()


def run_lines(lines: Sequence[str], folder: Path) -> None:
    """Run shell lines in a folder, with `deltasync` from this checkout."""
    program = folder / "deltasync"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "-euc", "\n".join(lines)], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    program.unlink()


def made_secrets(lines: Sequence[str], folder: Path) -> Secrets:
    """The Kubernetes Secrets that a README's lines create, by name and key."""
    run_lines([line for line in lines if not line.startswith("kubectl")], folder)
    made: Secrets = {}
    for words in map(shlex.split, lines):
        if words[:4] == ["kubectl", "create", "secret", "generic"]:
            files = [word.removeprefix("--from-file=").split("=") for word in words if "--from-file=" in word]
            made[words[4]] = {key: folder / path for key, path in files}
    return made


def mounted_secrets(pod: Mapping[str, Any], secrets: Secrets, folder: Path) -> dict[str, Path]:
    """Write the Secrets that a pod mounts into local folders; returns these by mount path."""
    (container,) = pod["containers"]
    named = {each["name"]: each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    places = {}
    for mount in container["volumeMounts"]:
        if mount["name"] in named:
            places[mount["mountPath"]] = place = folder / mount["name"]
            place.mkdir(parents=True, exist_ok=True)
            for key, path in secrets[named[mount["name"]]].items():
                (place / key).write_bytes(path.read_bytes())
    return places


def values_of(container: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables with literal values in a container's manifest."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def https(
    service: "Deployed", path: str, ca: Path | None = None, token: str = "", name: str = "localhost"
) -> httpx.Response:
    """Request a URL of a service over HTTPS; without a CA, skip verification like a kubelet."""
    context = ssl.create_default_context(cafile=ca)
    if ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(verify=context, headers=headers, timeout=30) as client:
        return client.get(f"https://127.0.0.1:{service.http}{path}", extensions={"sni_hostname": name})


def wait_for_probe(service: "Deployed", ca: Path, token: Path) -> None:
    """Wait until a row of the service's probe has returned, which shows that the probe has its roles."""

    def probe() -> Any:
        (process,) = https(service, "/status", ca, token.read_text().strip()).json()["processes"]
        return process["probe"]

    wait_for(lambda: (probe() or {}).get("turns"), probe, _WAIT_SECONDS)


def run_access(services: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Run the scripts of compose services that create credentials; returns the folder."""
    root = folder / "access"
    for service in services:
        for mount in service["volumes"]:
            (root / Path(mount.split(":")[1]).relative_to("/run/deltasync")).mkdir(parents=True, exist_ok=True)
        (script,) = service["command"]
        script = script.replace("$$", "$").replace("/run/deltasync", str(root))
        settings = [f"{name}={shlex.quote(value)}" for name, value in service.get("environment", {}).items()]
        run_lines([*settings, script.replace("python ", f"{sys.executable} ")], folder)
    return root


@contextmanager
def deployed(
    arguments: Sequence[str], environment: Mapping[str, str], data: Path, places: Mapping[str, Path]
) -> Iterator[Deployed]:
    """Start the service on free ports of all addresses, which it only allows with TLS and roles."""
    ports = grpc, http = free_ports(2)
    places = dict(places) | {CONFIGURATION: _settings_here(data.parent / "settings", places, ports)}
    settings = {"HOST": "0.0.0.0", "DATA_DIR": str(data)}  # noqa: S104
    settings |= {"GRPC_PORT": str(grpc), "HTTP_PORT": str(http)}
    env = os.environ | {name: moved(value, places) for name, value in environment.items()}
    process = subprocess.Popen(
        [*COMMAND, *(moved(argument, places) for argument in arguments)],
        env=env | {f"DELTASYNC_{name}": value for name, value in settings.items()},
    )
    with killed(process):
        while not (data / "endpoints.json").exists():
            assert process.poll() is None, "the service has ended"
            time.sleep(0.05)
        yield Deployed(process, grpc, http, places)


def _settings_here(folder: Path, places: Mapping[str, Path], ports: Sequence[int]) -> Path:
    """Copy the files next to the settings, with addresses and paths of this machine."""
    folder.mkdir()
    for path in filter(Path.is_file, places[CONFIGURATION].iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.toml"):
        text = path.read_text()
        for there, here in zip(PORTS, ports, strict=True):
            text = text.replace(f"localhost:{there}", f"localhost:{here}")
        path.write_text(moved(text, {**places, CONFIGURATION: folder}))
    return folder


def check_schema(documents: Iterable[Any]) -> None:
    """Check Kubernetes documents against the schema of the newest version."""
    import kubernetes_validate  # It takes seconds, which each worker would spend to collect a file.

    for each in documents:
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
