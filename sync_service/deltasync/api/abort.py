"""Ending a call with an error."""

from typing import Any, NoReturn

import grpc.aio

from deltasync.core.errors import DeltasyncError
from deltasync.wire.error_codes import grpc_code


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DeltasyncError) -> NoReturn:
    """End a call with an error."""
    await context.abort(grpc_code(error), str(error))
    raise error  # abort() itself raises; this tells the type checker so.
