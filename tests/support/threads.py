"""Threads in tests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT = 30


@contextmanager
def threads(*tasks: Callable[[], object]) -> Iterator[None]:
    """Run each task in a thread; raises their errors here."""
    failures: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as failure:  # noqa: BLE001  # raised below
            failures.append(failure)

    started = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for each in started:
        each.start()
    yield
    for each in started:
        each.join(WAIT)
        assert not each.is_alive()
    for failure in failures:
        raise failure
