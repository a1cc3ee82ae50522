"""Ending a call with an error."""

from typing import Any, NoReturn

import grpc.aio

from sync_service.error_codes import grpc_code
from sync_service.errors import DeltasyncError


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DeltasyncError) -> NoReturn:
    """End a call with an error."""
    await context.abort(grpc_code(error), str(error))
    raise error  # abort() itself raises; this tells the type checker so.
