"""The demo's processes on loopback, including the service, and their credentials for the service."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from deltasync.client import DeltasyncError, Endpoint

_START_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 60.0, 60.0, 0.02
_TAIL_LINES = 20
ADMIN, STATUS = "admin", "status"


class DemoFailed(DeltasyncError):
    """A process of the demo failed or timed out, or its results are wrong."""


class Processes:
    """Named child processes, each with a log file in a folder. They end at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, arguments: Sequence[str]) -> None:
        """Start `python -m ARGUMENTS`, with its output in NAME.log."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DELTASYNC_")}
        # Text logs, because users read them if something fails. One thread each, for more processes than cores.
        environment |= {"DELTASYNC_LOG_FORMAT": "text", "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONUNBUFFERED": "1", "no_proxy": "127.0.0.1,localhost"}
        command = [sys.executable, "-m", *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            # Use a new process group: Ctrl-C must only reach the parent, which then ends the process.
            self._running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
            )

    def tail(self, name: str) -> str:
        """The last lines of the process's log."""
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:])

    def pid(self, name: str) -> int:
        """The process id."""
        return self._running[name].pid

    def status(self, name: str) -> int | None:
        """The exit status of the process; None while it runs."""
        return self._running[name].poll()

    def running(self, name: str) -> bool:
        """Whether the process runs; DemoFailed if it ended with a status other than 0."""
        if status := self.status(name):
            raise DemoFailed(f"{name} ended with status {status}; the end of its log:\n{self.tail(name)}")
        return self.status(name) is None

    def stop(self, name: str) -> None:
        """Ask the process to end, even if it is stopped, and wait; DemoFailed unless it exits with 0 in time."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._running[name].send_signal(number)
        try:
            self._running[name].wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{name} did not end within {_STOP_SECONDS:.0f} s of SIGTERM") from None
        self.running(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class DemoService:
    """The sync service: `grpc` is HOST:PORT for trainers and replicas, `http` the URL for operators."""

    def __init__(self, processes: Processes, arguments: Sequence[str]) -> None:
        from deltasync.kernels.compiled import warm

        self.data_dir = processes.folder / "data-service"
        warm()  # Compile here, once for all processes, because the service would only listen after compiling.
        listen = ["--data-dir", str(self.data_dir), "--grpc-port", "0", "--http-port", "0"]
        processes.start("service", ["deltasync", "serve", *listen, *arguments])
        self.pid = processes.pid("service")
        endpoints, deadline = self.data_dir / "endpoints.json", time.monotonic() + _START_SECONDS
        while not endpoints.exists():
            if not processes.running("service") or time.monotonic() > deadline:
                raise DemoFailed(f"the service did not start; the end of its log:\n{processes.tail('service')}")
            time.sleep(_POLL_SECONDS)
        addresses = json.loads(endpoints.read_text())
        self.grpc, self.http = addresses["grpc"], addresses["http"]


class ProcessCredentials:
    """Endpoint files for all processes, with the credentials of each.

    Without `secure`, only the administrator has a token, and connections are plain text. With `secure`, all
    connections use mutual TLS: each process has its own certificate with the one role that it needs, and reads of
    status use a token.
    """

    def __init__(self, folder: Path, roles: Mapping[str, str], *, secure: bool) -> None:
        """Write tokens and certificates. `roles` has the roles of each process by name, with spaces between."""
        self._folder, self._secure = folder, secure
        self._names = [ADMIN, *roles]
        token = secrets.token_urlsafe()
        self._keep(f"{STATUS if secure else ADMIN}-token", token)
        if not secure:
            self.service_arguments = ["--admin-token-file", str(folder / f"{ADMIN}-token")]
            return
        # Import this late: making certificates needs `deltasync[service]`.
        from deltasync.access.roles import token_digest
        from deltasync.cli.certs import write_certificates

        certificates = folder / "certificates"
        write_certificates(certificates, ["127.0.0.1"], self._names, datetime.now(UTC) + timedelta(days=1))
        lines = [f'[tokens.{STATUS}]\nsha256 = "{token_digest(token).hex()}"\nroles = ["read"]\n']
        for name, role in {ADMIN: "admin", **roles}.items():
            lines.append(f'[certificates."{name}"]\nroles = {json.dumps(role.split())}\n')
        self._keep("roles.toml", "\n".join(lines))
        files = {"tls-cert": "service.pem", "tls-key": "service-key.pem", "tls-client-ca": "ca.pem"}
        tls = [word for flag, file in files.items() for word in (f"--{flag}", str(certificates / file))]
        self.service_arguments = [*tls, "--roles", str(folder / "roles.toml")]

    def write(self, service: DemoService) -> None:
        """Write the endpoint files, after the service has started to listen."""
        for name in (STATUS, *self._names):
            settings = {"address": service.grpc, "http": service.http}
            if self._secure:
                settings["ca"] = "certificates/ca.pem"
            if name == (STATUS if self._secure else ADMIN):
                settings["token_file"] = f"{name}-token"
            elif self._secure:
                settings |= {"cert": f"certificates/{name}.pem", "key": f"certificates/{name}-key.pem"}
            self.file(name).write_text("".join(f'{key} = "{value}"\n' for key, value in settings.items()))

    def file(self, name: str) -> Path:
        """The endpoint file of a process, for `--endpoint`."""
        return self._folder / f"endpoint-{name}.toml"

    def endpoint(self, name: str) -> Endpoint:
        """The endpoint of a process as an object."""
        return Endpoint.from_file(self.file(name))

    def _keep(self, name: str, content: str) -> None:
        (self._folder / name).touch(0o600)
        (self._folder / name).write_text(content)
