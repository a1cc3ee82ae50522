"""The file in the data directory that says where the service listens."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltasync.base.events import EventKind, Events
from deltasync.log.volume import refused

# Another one means that `grpc` or `http` is written in another way.
_FORMAT = 1
# Before it is written again.
_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Addresses:
    """Where the service listens: HOST:PORT of gRPC, a URL of HTTP."""

    grpc: str
    http: str


class EndpointsFile:
    """`endpoints.json` of a data directory, there while the service listens."""

    def __init__(self, data_dir: Path, events: Events) -> None:
        self._path = data_dir / "endpoints.json"
        self._events = events

    async def announce(self, where: Addresses, stopped: asyncio.Task[Literal[True]]) -> None:
        """Write where the service listens. On a full disk it serves what it has all the same, and tries again."""
        refusal = None
        while not stopped.done():
            try:
                self._write(where)
            except OSError as error:
                if refusal is None:
                    refusal = refused(f"{self._path} cannot be written", self._path, error)
                    self._events.emit(EventKind.FAILED, error=refusal)
            else:
                return
            await asyncio.wait({stopped}, timeout=_AGAIN_SECONDS)

    def withdraw(self) -> None:
        """Remove what was written there; on a volume that takes nothing it stays, until the next start."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            refusal = refused(f"{self._path} cannot be removed", self._path, error)
            self._events.emit(EventKind.FAILED, error=refusal)

    def _write(self, where: Addresses) -> None:
        """Write it, atomically."""
        endpoints = {"format": _FORMAT, "pid": os.getpid(), "grpc": where.grpc, "http": where.http}
        self._path.unlink(missing_ok=True)  # Of a process that was killed.
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(endpoints))
            new.replace(self._path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
