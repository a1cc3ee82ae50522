"""Tests that are coroutines."""

import asyncio
import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine: in the loop of its fixture `runner`, if it has one, else in a new one."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.function).parameters}
    runner = pyfuncitem.funcargs.get("runner")
    run = runner.run if isinstance(runner, asyncio.Runner) else asyncio.run
    run(asyncio.wait_for(pyfuncitem.function(**arguments), 60))
    return True
