"""The processes of the demo's service: one, or several that share a log of brokers."""

from collections.abc import Sequence
from pathlib import Path

from deltasync.client import Endpoint
from deltasync.client.route import Route
from deltasync.core.errors import DeltasyncError
from deltasync.trainer.demo.brokers import Brokers
from deltasync.trainer.demo.processes import Processes, Service

LEASE_SECONDS = 3
_SNAPSHOT_SECONDS = 5


def shared_log(brokers: Brokers, folder: Path) -> list[str]:
    """The arguments with which processes share a log of brokers."""
    replicas = min(3, len(brokers.brokers))
    arguments = ["--log", ",".join(brokers.urls), "--log-monitor", ",".join(brokers.monitors)]
    arguments += ["--log-replicas", str(replicas), "--lease-seconds", str(LEASE_SECONDS)]
    arguments += ["--snapshots", str(folder / "snapshots"), "--snapshot-seconds", str(_SNAPSHOT_SECONDS)]
    return arguments + (["--accept-log-risk"] if replicas < 3 else [])


class Services:
    """So many processes of the service, each started again when it is killed.

    Attributes:
        names: of the processes.
        grpc: where they answer trainers and replicas, with commas.
        http: where they answer operators, with commas.
    """

    def __init__(self, processes: Processes, arguments: Sequence[str], count: int, admin_token: str = "") -> None:
        self._processes = processes
        self.names = [f"service-{number}" for number in range(count)] if count > 1 else ["service"]
        self._all = [
            Service(processes, [*arguments, *(["--process", name] if count > 1 else [])], admin_token, name)
            for name in self.names
        ]
        self.grpc, self.http = ",".join(each.grpc for each in self._all), ",".join(each.http for each in self._all)

    @property
    def restarts(self) -> int:
        """How often one was started again."""
        return sum(each.restarts for each in self._all)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [each.pid for each in self._all]

    @property
    def table_bytes(self) -> int:
        """Bytes of the files of tables and views."""
        return sum(each.table_bytes for each in self._all)

    def keep_alive(self) -> None:
        """Start those again that were killed with SIGKILL.

        Raises:
            DemoFailed: one ended in another way.
        """
        for each in self._all:
            each.keep_alive()

    def kill_owner(self, model: str, token: str = "") -> str:
        """Kill the process that owns a model with SIGKILL: its name. Of several; one alone owns all."""
        name = self._owner(model, token) if len(self._all) > 1 else self.names[0]
        self._processes.kill(name)
        return name

    def _owner(self, model: str, token: str) -> str:
        lines = Route(Endpoint.of_http(Endpoint(self.http, token))).get_json("/processes")
        owners = [line["process"] for line in lines if model in line["models"]]
        if not owners:
            raise DeltasyncError(f"no process owns model {model!r}")
        return str(owners[0])
