"""The service as a deployment starts it: with its command line, its environment and its files, elsewhere."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tests.support.ports import free_ports
from tests.support.programs import killed

# Where every deployment has the service's settings, and the ports that it has there.
CONFIGURATION, PORTS = "/etc/deltasync", (50051, 8080)
COMMAND = [sys.executable, "-c", "from deltasync.cli.main import main; main()"]


class _Compose(yaml.SafeLoader):
    """Also takes compose's `!override`, which replaces a list instead of adding to it."""


def _list(loader: _Compose, node: yaml.SequenceNode) -> list[Any]:
    return list(loader.construct_sequence(node))


_Compose.add_constructor("!override", _list)


def compose_file(path: Path) -> dict[str, Any]:
    """What a file of compose says."""
    # Not an unsafe loader: it is SafeLoader with a list.
    return dict(yaml.load(path.read_text(), _Compose))  # noqa: S506


def compose_configs(file: Path, service: Mapping[str, Any], folder: Path) -> Path:
    """The folder of configuration that a service of a file of compose is given, in a new folder here."""
    documents = compose_file(file)["configs"]
    folder.mkdir()
    for each in service["configs"]:
        content = (file.parent / documents[each["source"]]["file"]).read_bytes()
        (folder / Path(each["target"]).relative_to(CONFIGURATION)).write_bytes(content)
    return folder


@dataclass(frozen=True)
class Deployed:
    """A service that runs, and where on this machine the paths of its deployment are."""

    process: "subprocess.Popen[bytes]"
    grpc: int
    http: int
    places: Mapping[str, Path]

    def here(self, text: str) -> str:
        return moved(text, self.places)


def moved(text: str, places: Mapping[str, Path]) -> str:
    """A text with paths of a deployment as they are on this machine, the longest ones first."""
    for path in sorted(places, key=len, reverse=True):
        text = text.replace(path, str(places[path]))
    return text


def readme_lines(readme: Path, heading: str) -> list[str]:
    """The lines of the first shell block below a heading."""
    block = re.search(rf"(?s)## {heading}\n.*?```sh\n(.*?)```", readme.read_text())
    assert block
    return block[1].replace("\\\n", " ").splitlines()


def run_lines(lines: Sequence[str], folder: Path) -> None:
    """Run shell lines in a folder, where `deltasync` is this checkout's."""
    program = folder / "deltasync"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["/bin/bash", "-euc", "\n".join(lines)], cwd=folder, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    program.unlink()


def run_access(services: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Run the scripts of compose's services that make what others are given; where they made it."""
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
    """The service on free ports of all addresses, where TLS and roles are all that lets it listen."""
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
    """A copy of the files beside the settings, in which addresses and paths are those of this machine."""
    folder.mkdir()
    for path in filter(Path.is_file, places[CONFIGURATION].iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("*.toml"):
        text = path.read_text()
        for there, here in zip(PORTS, ports, strict=True):
            text = text.replace(f"localhost:{there}", f"localhost:{here}")
        path.write_text(moved(text, {**places, CONFIGURATION: folder}))
    return folder
