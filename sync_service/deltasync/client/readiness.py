"""Whether a replica is ready: what it holds was the newest a short while ago, whatever clocks say.

    the replica    sends its own time with every ack, as a token
    the service    gives back the newest token it has read, and for how long what it names had not been the newest
    the replica    now knows that this was the newest at the token's time less that while, or later

No clock is compared with another one, and nothing that delays a message can make what it shows look younger: the
token in it was sent before it was made.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from deltasync.base.clock import FOREVER_NS
from deltasync.base.decision import Decision
from deltasync.base.words import listed

logger = logging.getLogger(__name__)
# A callback that does not return is told no more than so many changes.
_MOST_UNTOLD = 1_000


class Readiness:
    """The readiness of one replica. Evidence comes from the subscriber's thread; a thread of its own tells each
    change, also that the limit is over.
    """

    def __init__(
        self,
        replica: str,
        on_change: Callable[[Decision], None] | None,
        clock: Callable[[], int],
    ) -> None:
        self._replica = replica
        self._on_change = on_change
        self._clock = clock
        self._evidence = Evidence(started_ns=clock())
        self._changed = threading.Condition()
        self._untold = deque[Decision](maxlen=_MOST_UNTOLD)
        self._ready = self._closed = False
        self._thread = threading.Thread(target=self._watch, name="deltasync-readiness", daemon=True)
        self._thread.start()

    @property
    def decision(self) -> Decision:
        """Whether the replica is ready now, and why."""
        return decide(self._evidence, self._clock())

    def wait(self, timeout_seconds: float | None) -> Decision:
        """Wait until the replica is ready or its subscriber has stopped, or for so long."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_seconds) or self.decision

    def limit(self, seconds: float) -> None:
        """The consumer's limit; 0 = none."""
        self._learn(lambda evidence: replace(evidence, limit_ns=int(seconds * 1e9) or None))

    def lacks(self, why: str) -> None:
        """What keeps the replica from showing that what it holds is newer."""
        self._learn(lambda evidence: replace(evidence, lacking=why))

    def holds(self, newest: int | None, *, reset: bool = False) -> None:
        """The replica holds something: see `Evidence.holding`."""
        self._learn(lambda evidence: evidence.holding(newest, reset=reset))

    def differs(self, tables: Iterable[str]) -> None:
        """The tables of which the replica holds other rows than it was sent."""
        self._learn(lambda evidence: replace(evidence, wrong=tuple(tables)))

    def end(self, why: str) -> None:
        """The replica's subscriber has stopped; the first reason counts."""
        self._learn(lambda evidence: replace(evidence, ended=evidence.ended or why))

    def close(self) -> None:
        """End the thread, once the last change is told. `end` comes before."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _learn(self, learnt: "Callable[[Evidence], Evidence]") -> None:
        with self._changed:
            self._evidence = learnt(self._evidence)
            self._note()  # However soon it changes again: who is told late is told all the same.
            self._changed.notify_all()

    def _note(self) -> None:
        if (decision := self.decision).yes != self._ready:
            self._ready = decision.yes
            self._untold.append(decision)

    def _settled(self) -> Decision | None:
        decision = self.decision
        return decision if decision.yes or self._evidence.ended else None

    # The thread of its own.

    def _watch(self) -> None:
        closed = False
        while not closed:
            decisions, closed = self._next()
            for decision in decisions:
                self._tell(decision)

    def _next(self) -> tuple[list[Decision], bool]:
        """What is to be told, after a wait if that is nothing yet; and whether it is the last."""
        with self._changed:
            seconds = self._seconds_left()  # Before it is decided: None also where the limit is over.
            self._note()
            if not self._closed and not self._untold:
                self._changed.wait(seconds)  # Only once: what is learnt may end it sooner.
                self._note()
            decisions = list(self._untold)
            self._untold.clear()
            return decisions, self._closed

    def _seconds_left(self) -> float | None:
        """How long the replica stays ready if nothing comes; None = until something does."""
        evidence = self._evidence
        if evidence.newest_ns is None or evidence.limit_ns is None or not self.decision.yes:
            return None
        return max(0, evidence.newest_ns + evidence.limit_ns + 1 - self._clock()) / 1e9

    def _tell(self, decision: Decision) -> None:
        level = logging.INFO if decision.yes or self._evidence.ended else logging.WARNING
        state = "ready" if decision.yes else "not ready any more"
        logger.log(level, "replica %s is %s: %s", self._replica, state, decision.reason)
        try:
            if self._on_change:
                self._on_change(decision)
        except Exception:  # it must not end the telling
            logger.exception("replica %s: on_readiness has failed", self._replica)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a replica knows of how new its rows are. Times are its own, by `steady_ns`.

    Attributes:
        started_ns: when its subscriber was made.
        newest_ns: when what it holds was the newest, or that was later; None = nobody has shown that yet.
        limit_ns: how long ago that may be; None = as long as it likes, but not before `started_ns`.
        lacking: what keeps it from showing that what it holds is newer; empty if nothing does.
        wrong: tables of which it holds other rows than it was sent.
        ended: why its subscriber has stopped; empty if it has not.
    """

    started_ns: int
    newest_ns: int | None = None
    limit_ns: int | None = None
    lacking: str = "it has not reached the service yet"
    wrong: tuple[str, ...] = ()
    ended: str = ""

    def holding(self, newest_ns: int | None, *, reset: bool = False) -> "Evidence":
        """The same once the replica holds what was the newest at a time or later; None where nobody knows.

        `reset` says that this does not continue what it held before. Otherwise it is later than that.
        """
        before = None if reset else self.newest_ns
        known = [each for each in (before, newest_ns) if each is not None]
        lacking = "" if newest_ns is not None else "nobody knows since when there is something newer"
        return replace(self, newest_ns=max(known, default=None), lacking=lacking)


def decide(evidence: Evidence, now_ns: int) -> Decision:
    """Whether a replica is ready at a time, and why."""
    if evidence.ended:
        return Decision(False, evidence.ended)
    if evidence.wrong:
        return Decision(False, f"its rows are not those that it was sent in {listed(evidence.wrong)}")
    if evidence.newest_ns is None:
        return Decision(False, evidence.lacking)
    if evidence.limit_ns is None:
        if evidence.newest_ns >= evidence.started_ns:
            return Decision(True, "it has held the newest since it was started")
        return Decision(False, _with("it has not held the newest since it was started", evidence.lacking))
    ago_ns = max(0, now_ns - evidence.newest_ns)
    text = f"what it holds was the newest {ago_ns / 1e9:.1f} s ago, the limit is {evidence.limit_ns / 1e9:.15g} s"
    return Decision(ago_ns <= evidence.limit_ns, _with(text, evidence.lacking))


def _with(text: str, lacking: str) -> str:
    return f"{text}; {lacking}" if lacking else text


def newest_ns(token_ns: int, behind_ns: int, opened_ns: int) -> int | None:
    """When what a message names was the newest, or that was later; None if the message does not show it.

    Args:
        token_ns: the token that came back with it; 0 = none.
        behind_ns: for how long what it names had not been the newest, as the service says.
        opened_ns: when its stream was opened: the message was made later.
    """
    return None if behind_ns >= FOREVER_NS else (token_ns or opened_ns) - behind_ns
