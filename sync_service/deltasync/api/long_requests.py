"""Requests that take minutes or hours: they end when the client hangs up."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from deltasync.core.errors import ServiceUnavailable
from deltasync.service.service import Service

T = TypeVar("T")


async def while_wanted(request: Request, service: Service, work: Coroutine[Any, Any, T]) -> T:
    """Do the work of a request whose body was read. Cancel it if the client hangs up or the service shuts down.

    Raises:
        ServiceUnavailable: one of both has happened.
    """
    working = asyncio.create_task(work)
    gone, draining = asyncio.create_task(_gone(request)), asyncio.create_task(service.draining.wait())
    try:
        await asyncio.wait({working, gone, draining}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        left = gone.done()
    finally:
        for each in (working, gone, draining):
            each.cancel()
        await asyncio.gather(working, return_exceptions=True)
    raise ServiceUnavailable("the client has hung up" if left else "the service is shutting down; ask again")


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
