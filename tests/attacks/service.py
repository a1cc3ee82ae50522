"""The service that is attacked, in a process of its own, with who may do what in it."""

import hashlib
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.attack import Attack
from tests.attacks.target import CONSUMER, MODEL
from tests.support.process import ServiceProcess
from tests.support.volumes import small_volume

_SLOW_FLUSH = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
int fdatasync(int file) { usleep(10000); return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file); }
int fsync(int file) { usleep(10000); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(file); }
"""
_STRANGER_ROLES = ["publish:strange*", "subscribe:strange*"]


@dataclass(frozen=True)
class Served:
    """A service, and the tokens of those who use it: empty where it has no roles."""

    process: "LoggedService"
    honest: str = field(default="", repr=False)
    stranger: str = field(default="", repr=False)


@contextmanager
def serving(attack: Attack, *, roles: bool) -> Iterator[Served]:
    """A service under the conditions of an attack."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltasync-attack-")))
        volume = stack.enter_context(small_volume(attack.volume_bytes)) if attack.volume_bytes else folder
        arguments, tokens = _consumers(attack), {"honest": "", "stranger": ""}
        if roles:
            tokens = {name: secrets.token_urlsafe(32) for name in tokens}
            arguments += ["--roles", str(_roles_file(folder, tokens))]
        process = LoggedService(volume / "data", *arguments, log=folder / "service.log")
        if attack.slow_disk:
            process.preload(_slow_disk(folder))
        stack.enter_context(process)
        if attack.descriptors:
            most = (attack.descriptors, attack.descriptors)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, most)
        yield Served(process, **tokens)


class LoggedService(ServiceProcess):
    """A service of a process of its own whose log is a file."""

    def __init__(self, data_dir: Path, *arguments: str, log: Path) -> None:
        super().__init__(data_dir, *arguments, fresh=True, log=log)
        self.log: Path = log

    def preload(self, library: Path) -> None:
        """Start it with a library before all others."""
        self._environment = self._environment | {"LD_PRELOAD": str(library)}


def _consumers(attack: Attack) -> list[str]:
    named = [
        f"{CONSUMER}={MODEL}",
        *(f"consumer-of-somebody-else-{number:04}=other" for number in range(attack.consumers)),
    ]
    return [argument for name in named for argument in ("--consumer", name)]


def _roles_file(folder: Path, tokens: dict[str, str]) -> Path:
    roles = {"honest": [f"publish:{MODEL}", f"subscribe:{CONSUMER}"], "stranger": _STRANGER_ROLES}
    path = folder / "roles.toml"
    path.write_text(
        "".join(
            f"[tokens.{name}]\nsha256 = {hashlib.sha256(token.encode()).hexdigest()!r}\nroles = {roles[name]}\n"
            for name, token in tokens.items()
        )
    )
    os.chmod(path, 0o600)
    return path


def _slow_disk(folder: Path) -> Path:
    """A library with which each flush takes 10 ms more."""
    compiler = shutil.which("cc") or sys.exit("an attack on a service with a slow disk needs a C compiler")
    source, library = folder / "slow.c", folder / "slow.so"
    source.write_text(_SLOW_FLUSH)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library
