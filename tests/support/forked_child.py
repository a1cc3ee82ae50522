"""Runs a function in a fork of this process."""

import json
import os
from collections.abc import Callable
from typing import Any

from deltasync.base.errors import DeltasyncError


def answers_in_a_fork(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a function in a fork of this process, which ends at once."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer: dict[str, Any] = json.loads(pipe.read())
    os.waitpid(child, 0)
    return answer


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of the error that a call raises; empty if it raises none."""
    try:
        call()
    except DeltasyncError as error:
        return f"{type(error).__name__}: {error}"
    return ""
