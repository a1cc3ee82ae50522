"""Readers side by side or one writer, in fair turns: the decisions against a model, then with threads."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.examples import stateful
from tests.support.threads import WAIT, threads

from deltasync.base.errors import Contradiction
from deltasync.client.targets.local import Gate, LockOrder

PEOPLE = range(8)


@dataclass
class Waiting:
    """Who waits, for what, and how many turns of the others it has seen, of how many that it may see."""

    writes: bool
    allowed: int
    seen: int = 0


class Fairness(RuleBasedStateMachine):
    """Whoever waits is overtaken by one turn at most of the others, and by one more for each writer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = LockOrder()
        self.readers: dict[int, int] = {}
        self.writer: int | None = None
        self.waiting: dict[int, Waiting] = {}  # In the order in which they came.

    def _writers(self) -> list[int]:
        return [who for who, each in self.waiting.items() if each.writes]

    def _idle(self) -> list[int]:
        return [who for who in PEOPLE if who not in {*self.readers, self.writer, *self.waiting}]

    def _observe(self) -> None:
        """Note who of those who wait has been let in, and that it was their turn."""
        entered = [who for who in self.waiting if self.turns.inside(who)]
        writers = [who for who in entered if self.waiting[who].writes]
        readers = [who for who in entered if not self.waiting[who].writes]
        assert not (writers and readers)
        if writers:
            assert writers == self._writers()[:1], "in the order in which they came, one at a time"
            self.writer = writers[0]
        if readers:
            assert readers == [who for who, each in self.waiting.items() if not each.writes], "all together"
            self.readers |= dict.fromkeys(readers, 1)
        for who in entered:
            del self.waiting[who]
        for each in self.waiting.values():
            each.seen += bool(readers if each.writes else writers)

    @precondition(lambda self: self._idle())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self._idle()))
        free = self.writer is None and not self._writers()
        assert self.turns.read(who) == free, "at once, unless a writer is inside or waits"
        if free:
            self.readers[who] = 1
        else:
            self.waiting[who] = Waiting(False, allowed=1)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def read_again(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.readers)))
        assert self.turns.read(who), "or it would wait for itself"
        self.readers[who] += 1

    @precondition(lambda self: self._idle())
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self._idle()))
        free = self.writer is None and not self.readers
        assert self.turns.write(who) == free
        if free:
            self.writer = who
        else:
            before = len(self._writers()) + (self.writer is not None)
            self.waiting[who] = Waiting(True, allowed=before)

    @precondition(lambda self: self.readers or self.writer is not None)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        inside = sorted(self.readers) if self.writer is None else [self.writer]
        who = data.draw(st.sampled_from(inside))
        self.turns.leave(who)
        if who == self.writer:
            self.writer = None
        elif self.readers[who] > 1:
            self.readers[who] -= 1
        else:
            del self.readers[who]
        self._observe()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[who]
        self.turns.withdraw(who)
        assert not self.turns.inside(who)
        self._observe()

    @invariant()
    def those_are_inside_who_are_to_be(self) -> None:
        assert (self.turns.readers, self.turns.writer) == (self.readers, self.writer)
        assert self.writer is None or not self.readers

    @invariant()
    def nobody_is_overtaken_for_long(self) -> None:
        assert all(each.seen <= each.allowed for each in self.waiting.values())

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if self.waiting:
            assert self.readers or self.writer is not None
        if self.writer is None and any(not each.writes for each in self.waiting.values()):
            assert self._writers(), "readers wait for a writer, never for readers"


TestFairness = Fairness.TestCase


class Observed(Gate):
    """Counts who begins to wait."""

    def __init__(self, patience_seconds: float = 10.0) -> None:
        super().__init__(patience_seconds)
        self.waits = threading.Semaphore(0)
        wait_for = self._moved.wait_for

        def counted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            self.waits.release()  # The lock is held until it waits.
            return wait_for(predicate, timeout)

        self._moved.wait_for = counted  # type: ignore[method-assign, assignment]

    def until_waiting(self) -> None:
        assert self.waits.acquire(timeout=WAIT)


class Interrupted(Gate):
    """Interrupts each thread that has to wait."""

    def __init__(self) -> None:
        super().__init__()

        def interrupted(predicate: Callable[[], bool], timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

        self._moved.wait_for = interrupted  # type: ignore[method-assign, assignment]


def through(gate: AbstractContextManager[None], seen: list[str], name: str) -> Callable[[], None]:
    def task() -> None:
        with gate:
            seen.append(name)

    return task


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_an_exception_inside_releases_the_lock(kind: str) -> None:
    gate, seen = Gate(), list[str]()
    with pytest.raises(ZeroDivisionError), getattr(gate, kind)():
        raise ZeroDivisionError
    with threads(through(gate.writing(), seen, "writer")):
        pass
    assert seen == ["writer"]


def test_a_thread_that_would_wait_for_itself_is_an_error() -> None:
    gate, seen = Gate(), list[str]()
    pairs = ((gate.writing, gate.reading), (gate.writing, gate.writing), (gate.reading, gate.writing))
    for inside, refused in pairs:
        with inside(), pytest.raises(Contradiction, match="would wait for itself"), refused():
            pass
        with threads(through(gate.reading(), seen, "reader"), through(gate.writing(), seen, "writer")):
            pass
    assert len(seen) == 6, "who was refused is neither inside nor waiting"


def test_a_reading_may_end_in_another_thread() -> None:
    gate, seen, reading = Gate(), list[str](), list[AbstractContextManager[None]]()

    def begin() -> None:
        reading.append(gate.reading())
        reading[0].__enter__()

    def end() -> None:
        reading[0].__exit__(None, None, None)

    with threads(begin):
        pass
    with threads(end):
        pass
    with threads(through(gate.writing(), seen, "writer")):
        pass
    assert seen == ["writer"]


def test_garbage_collection_may_end_a_reading_inside_the_lock() -> None:
    gate, seen = Gate(), list[str]()

    def end_within() -> None:
        left = gate.reading()
        left.__enter__()
        with gate._lock:
            del left

    with threads(end_within):
        pass
    with threads(through(gate.writing(), seen, "writer")):
        pass
    assert seen == ["writer"]


def test_a_writer_that_waits_for_long_names_the_readers(caplog: pytest.LogCaptureFixture) -> None:
    gate, seen, name = Observed(patience_seconds=0.0), list[str](), threading.current_thread().name

    def others_move(_: logging.LogRecord) -> bool:
        with threads(lambda: gate._leave(-1)):
            return True

    gate._turns.read(-1)
    logger = logging.getLogger("deltasync.client.targets.local")
    logger.addFilter(others_move)
    with ExitStack() as later, gate.reading():
        later.callback(logger.removeFilter, others_move)
        later.enter_context(threads(through(gate.writing(), seen, "writer")))
        for _ in range(2):
            gate.until_waiting()
    assert seen == ["writer"]
    (said,) = [each.message for each in caplog.records]
    assert said.endswith(f"and still waits; their threads: a thread that has ended, {name}")


def test_a_waiting_writer_goes_before_a_reader_that_comes_later() -> None:
    gate, seen = Observed(), list[str]()
    with ExitStack() as later, gate.reading():
        for name, block in (("writer", gate.writing()), ("reader", gate.reading())):
            later.enter_context(threads(through(block, seen, name)))
            gate.until_waiting()
        assert seen == []
    assert seen == ["writer", "reader"]


@pytest.mark.parametrize("kind", ["reading", "writing"])
def test_an_interrupted_thread_keeps_nobody_out(kind: str) -> None:
    gate, seen = Interrupted(), list[str]()
    with gate.reading() if kind == "writing" else gate.writing():

        def come() -> None:
            with pytest.raises(KeyboardInterrupt), getattr(gate, kind)():
                pass

        with threads(come):
            pass
    for name, again in (("reader", gate.reading()), ("writer", gate.writing())):
        with threads(through(again, seen, name)):
            pass
    assert seen == ["reader", "writer"]


TestFairness.settings = stateful()
