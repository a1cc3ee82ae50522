"""Child processes of a benchmark, in a folder that is removed at its end."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from deltasync.client import Endpoint, Publisher, PublisherOptions, Shard, TableSpec
from deltasync.trainer.example.processes import DemoService, Processes

_POLL_SECONDS = 0.05


class Peer:
    """A process that answers every line with a line."""

    def __init__(self, arguments: list[str], module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        self.begin(line)
        return self.read()

    def begin(self, line: str) -> None:
        """Send a line whose answer is read later."""
        if self.process.stdin is None:
            raise RuntimeError("the peer has no input")
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> str:
        if self.process.stdout is None:
            raise RuntimeError("the peer has no output")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer of the benchmark ended with status {self.process.wait()}")
        return line.strip()

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(30)
        if self.process.stdout:
            self.process.stdout.close()


def publisher(service: str | Endpoint, tables: list[TableSpec]) -> Publisher:
    """The one rank of model "bench", with all rows of its tables."""
    options = PublisherOptions(service=service, model="bench", run="bench", run_started_unix_ns=time.time_ns())
    return Publisher(options, tables, [Shard.whole(table) for table in tables])


class Children:
    """A service and peers, ended together."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="deltasync-bench-")
        self.processes = Processes(Path(self._folder.name))
        self._peers: list[Peer] = []

    def service(self, *arguments: str, admin_token: str = "") -> DemoService:
        if admin_token:
            file = self.processes.folder / "admin-token"
            file.touch(0o600)
            file.write_text(admin_token)
            arguments += ("--admin-token-file", str(file))
        return DemoService(self.processes, arguments)

    def peer(self, *arguments: str, module: str = "tests.bench.peers") -> Peer:
        self._peers.append(Peer(list(arguments), module))
        return self._peers[-1]

    def run_ranks(self, ranks: int, module: str, arguments: list[str]) -> None:
        """Run a module on some ranks under torchrun, until it has ended."""
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", module]
        self.processes.start(module, [*torchrun, *arguments])
        while self.processes.running(module):
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> Self:
        self.processes.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers:
            peer.close()
        self.processes.__exit__(kind, error, trace)
        self._folder.cleanup()
