"""Work that a request waits for: it ends with the request, whoever ends that."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import Request

from deltasync.api.long_requests import while_wanted
from deltasync.core.errors import Contradiction, ServiceUnavailable


@dataclass
class Draining:
    """What of a service matters here."""

    draining: asyncio.Event = field(default_factory=asyncio.Event)


class Client:
    """Sends a request, and hangs up when it is told to."""

    def __init__(self) -> None:
        self._messages = asyncio.Queue[dict[str, Any]]()
        self._messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        self.request = Request({"type": "http"}, self._messages.get)

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


class Work:
    """Takes for ever, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), False

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize(("end", "said"), [("client", "has hung up"), ("service", "is shutting down; ask again")])
def test_it_is_cancelled_with_its_client_and_with_the_service(end: str, said: str) -> None:
    async def main() -> None:
        client, service, work = Client(), Draining(), Work()
        asked = asyncio.create_task(while_wanted(client.request, service, work.run()))  # type: ignore[arg-type]
        await work.begun.wait()
        client.hang_up() if end == "client" else service.draining.set()
        with pytest.raises(ServiceUnavailable, match=said):
            await asked
        assert work.cancelled

    asyncio.run(main())


def test_it_is_cancelled_with_the_task_that_answers() -> None:
    async def main() -> None:
        work = Work()
        asked = asyncio.create_task(while_wanted(Client().request, Draining(), work.run()))  # type: ignore[arg-type]
        await work.begun.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert work.cancelled

    asyncio.run(main())


def test_its_result_and_its_error_are_those_of_the_request() -> None:
    async def done() -> int:
        return 7

    async def failing() -> int:
        raise Contradiction("no")

    async def main() -> None:
        assert await while_wanted(Client().request, Draining(), done()) == 7  # type: ignore[arg-type]
        with pytest.raises(Contradiction):
            await while_wanted(Client().request, Draining(), failing())  # type: ignore[arg-type]

    asyncio.run(main())
