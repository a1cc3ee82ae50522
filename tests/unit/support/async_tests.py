"""Tests that are `async` functions: what runs them gives them their first arguments, and fixtures the others."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from tests.support import local_service

Test = Callable[..., Coroutine[Any, Any, None]]


def as_test(run: Callable[..., None], given: int = 1, **settings: Any) -> Callable[[Test], Callable[..., None]]:
    """Make a test of an `async` function: `run(tmp_path, scenario, **settings)` gives it so many arguments."""

    def decorated(test: Test) -> Callable[..., None]:
        names = list(inspect.signature(test).parameters)[given:]

        @functools.wraps(test)
        def run_test(**fixtures: Any) -> None:
            wanted = {name: fixtures[name] for name in names}
            run(fixtures["tmp_path"], lambda *things: test(*things, **wanted), **settings)

        asked = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
            for name in {"tmp_path": 0} | dict.fromkeys(names)
        ]
        run_test.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        return run_test

    return decorated


in_service = partial(as_test, local_service.run)
"""In a service whose data are in `tmp_path`: `@in_service(checkpoint_bytes=1)`."""
