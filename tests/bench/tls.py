"""Throughput from publish to applied with mutual TLS, over the same in plain text.

Two services, each with a trainer and a replica, take turns: one with mutual TLS and roles, one without. A row
crosses two streams on its way, and is encrypted and decrypted on both.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tests.bench.children import Children, publisher
from tests.bench.publish import (
    CUTS,
    DIM,
    ROUNDS,
    ROWS,
    WARM_UP,
    Turn,
    publish_rows,
    publish_to_applied,
    table_of,
    timed,
)

from deltasync.base.process import keep_freed_memory
from deltasync.cli.certs import write_certificates
from deltasync.client import Endpoint, TableSpec
from deltasync.trainer.example.processes import DemoService

_MODEL = "bench"
_ROLES = {"trainer": f"publish:{_MODEL}", "replica": f"subscribe:{_MODEL}"}


def run(console: Console) -> dict[str, Any]:
    keep_freed_memory()
    values = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    with ExitStack() as stack:
        turns = [stack.enter_context(_path(values, secure=secure)) for secure in (True, False)]
        rounds = [[turn(number) for turn in turns] for number in range(WARM_UP + ROUNDS)]
    return _report(console, [(tls, plain) for tls, plain in rounds[WARM_UP:]])


@contextmanager
def _path(values: NDArray[np.float32], *, secure: bool) -> Iterator[Callable[[int], Turn]]:
    """A service with a trainer and a replica: what carries all rows from one to the other, in a numbered round."""
    with Children() as children:
        folder = children.processes.folder
        access = _certificates(folder) if secure else []
        service = children.service("--consumer", f"{_MODEL}={_MODEL}", *access)
        trainer, follower = (_endpoint(folder, service, name, secure=secure) for name in _ROLES)
        replica = children.peer("replica", str(follower))
        replica.read()
        with publisher(Endpoint.from_file(trainer), [table_of(values)]) as source:
            publish_rows(source, values, step=1, cuts=1)
            yield timed([service.pid], lambda n: publish_to_applied(source, replica.ask, values, n))


def _certificates(folder: Path) -> list[str]:
    """Certificates with a role each; arguments of a service that asks for them."""
    write_certificates(folder / "certificates", ["127.0.0.1"], list(_ROLES), datetime.now(UTC) + timedelta(days=1))
    roles = "".join(f'[certificates."{name}"]\nroles = ["{role}"]\n' for name, role in _ROLES.items())
    (folder / "roles.toml").write_text(roles)
    files = {"tls-cert": "service.pem", "tls-key": "service-key.pem", "tls-client-ca": "ca.pem"}
    tls = [f"--{flag}={folder / 'certificates' / file}" for flag, file in files.items()]
    return [*tls, f"--roles={folder / 'roles.toml'}"]


def _endpoint(folder: Path, service: DemoService, name: str, *, secure: bool) -> Path:
    """The endpoint file of a process."""
    settings = {"address": service.grpc}
    if secure:
        settings |= {"ca": "certificates/ca.pem"}
        settings |= {"cert": f"certificates/{name}.pem", "key": f"certificates/{name}-key.pem"}
    file = folder / f"endpoint-{name}.toml"
    file.write_text("".join(f'{key} = "{value}"\n' for key, value in settings.items()))
    return file


def _report(console: Console, rounds: list[tuple[Turn, Turn]]) -> dict[str, Any]:
    size = ROWS * TableSpec("bench", ROWS, DIM).row_bytes / 1e9
    kinds = list(zip(*rounds, strict=True))
    tls, plain = (size / statistics.median(turn.seconds for turn in turns) for turns in kinds)
    tls_cpu, plain_cpu = (statistics.median(turn.cpu_seconds for turn in turns) / size for turns in kinds)
    ratio = statistics.median(plain.seconds / tls.seconds for tls, plain in rounds)
    console.print(f"tls: {ROWS:,} rows x {DIM} fp32 in {CUTS} cuts, median of {len(rounds)} rounds")
    console.print(f"  publish to applied, plain text  {plain:.2f} GB/s   CPU of the service {plain_cpu:.2f} s/GB")
    console.print(f"  the same with mutual TLS        {tls:.2f} GB/s   CPU of the service {tls_cpu:.2f} s/GB")
    console.print(f"  ratio                           {ratio:.2f}  (aim 0.6)")
    return {
        "tls_ratio": ratio,
        "tls_cpu_ratio": tls_cpu / plain_cpu,
        "tls_gb_per_second": tls,
        "plain_gb_per_second": plain,
        "rounds": len(rounds),
    }
