"""A service under attack, with a trainer and a replica that must not notice anything, and its log to check."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
from tests.attacks.service import LoggedService
from tests.attacks.watch import Usage, Watch
from tests.support.fleet import Recorder, Trainer, follow

from deltasync.client import Position, Subscriber

TOKEN = "secret"  # noqa: S105
_WAIT_SECONDS = 20.0
# What may be left for a while: of allocators, of pools of threads, of connections that are just being closed.
_SPARE = Usage(memory=128 << 20, disk=32 << 20, threads=8, descriptors=16)
_LINE = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ((DEBUG|INFO|WARNING) deltasync[a-z_.]*|ERROR deltasync.events) "
)
LONGEST_REFUSAL = 2_000
LONGEST_LINE = 4_000
# What gRPC, or this service, says on purpose. UNKNOWN and INTERNAL are faults, DEADLINE_EXCEEDED is a hang.
CANONICAL = set(grpc.StatusCode) - {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
}


class Besieged(LoggedService):
    """The service, its trainer and its replica."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        consumers = [f"--consumer={name}=clicks" for name in ("predictors", "probes")]
        super().__init__(folder / "data", *consumers, *arguments, log=log)
        self._environment |= {"DELTASYNC_ADMIN_TOKEN": TOKEN}
        self.replica = Recorder()

    def __enter__(self) -> Self:
        super().__enter__()
        self.trainer = Trainer(self.grpc)
        self.head = self.trainer.publish_all()
        self._subscriber: Subscriber = follow(self, "predictors", "honest", self.replica)
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._subscriber.close()
            self.trainer.publisher.close()
        finally:
            super().__exit__(*error)

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Check that the block leaves nothing behind: trainer and replica continue, and resources are freed."""
        watch = Watch(self.pid, self.data_dir, self.log)
        before = watch.look()
        yield
        self.check_honest()
        _wait_until_no_more(watch, before)
        self._check_log(before.log)

    def check_honest(self) -> None:
        """Check that rows from the trainer reach the replica."""
        head: Position = self.trainer.change(5)
        self._subscriber.wait_for(head.number, _WAIT_SECONDS)
        assert self.replica.bytes() == self.trainer.expected()

    def _check_log(self, start: int) -> None:
        """Check that every log line from a position on is well-formed and short."""
        for line in self.log.read_bytes()[start:].decode().splitlines():
            assert _LINE.match(line), line[:500]
            assert len(line) < LONGEST_LINE, line[:500]


def _wait_until_no_more(watch: Watch, before: Usage) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while (more := before.more(now := watch.look(), _SPARE)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not more, f"{before}, now {now}"


def check_refusal(code: grpc.StatusCode, details: str | None) -> None:
    """Check that a call ended with one of the allowed errors."""
    assert code in CANONICAL, (code, details)
    assert len((details or "").encode()) < LONGEST_REFUSAL, (code, len(details or ""))
    assert code is grpc.StatusCode.OK or details, code
