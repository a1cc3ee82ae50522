"""A service in a thread of the test's process, on free ports: starts quickly, but has no signals and no kill."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.support.faults import Faults
from tests.support.http import HttpStatus

from deltasync.api.process import StartProbe, run
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import Policy
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service

_DEADLINE_SECONDS = 30.0
CONSUMERS = (ConsumerOptions("predictors", "clicks"), ConsumerOptions("probes", "clicks"))
TOKEN = "secret"  # noqa: S105


class RunningService(HttpStatus):
    """`server.run` in a thread, with consumers "predictors" and "probes" of model "clicks", and others.

    Attributes:
        faults: the calls of its log and places.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        grpc_port: int = 0,
        http_port: int = 0,
        policies: Mapping[str, Policy] | None = None,
        admin_token: str | None = TOKEN,
        roles: Path | None = None,
        faults: Faults | None = None,
        metrics_seconds: float = 0.0,
        **settings: Any,
    ) -> None:
        self.faults = faults or Faults()
        named = [ConsumerOptions(name, "clicks", policy) for name, policy in (policies or {}).items()]
        self.options = ServiceOptions(
            data_dir=data_dir,
            grpc_port=grpc_port,
            http_port=http_port,
            consumers=(*CONSUMERS, *named),
            admin_token=admin_token,
            roles=roles,
            drain_seconds=0.1,
            metrics_seconds=metrics_seconds,
            **settings,
        )
        self.start_probe: StartProbe | None = None
        self._endpoints = data_dir / "endpoints.json"
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Start the service; raises the error that prevented it from listening."""
        self._endpoints.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name="service", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not self._endpoints.exists():
            if not self._thread.is_alive():
                self.stop()
            assert time.monotonic() < deadline, "the service did not listen in time"
            time.sleep(0.002)
        found = json.loads(self._endpoints.read_text())
        self.grpc, self.http = found["grpc"], found["http"]

    def stop(self) -> None:
        """Drain the service; raises the error that ended it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_DEADLINE_SECONDS)
        assert not self._thread.is_alive(), "the service did not drain in time"
        if self._failure:
            raise self._failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  # handed over to the test's thread
            self._failure = error

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        make = partial(Service, **self.faults.collaborators)
        await run(self.options, self._stopping, start_probe=self.start_probe, make=make)
