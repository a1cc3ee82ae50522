"""Answering a stream, whose peer may go in the middle of a message."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio


async def answer(context: grpc.aio.ServicerContext[Any, Any], responses: AsyncGenerator[Any, None]) -> None:
    """Send what a stream is to be sent. A peer that goes meanwhile closes `responses`, as one that cancels does.

    gRPC itself, given the generator, would write its own error with a traceback for who just went.
    """
    async with aclosing(responses):
        async for response in responses:
            try:
                await context.write(response)
            except grpc.aio.InternalError as error:  # Nothing can be sent any more.
                raise asyncio.CancelledError from error
