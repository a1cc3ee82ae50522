"""Decides whether a replica is ready: whether its rows were the newest a short while ago.

    the replica    sends its own time with every ack, as a token
    the service    returns the newest token with a version, and for how long that version has been out of date
    the replica    subtracts that duration from the token: the version was the newest then, or later

This compares no clocks of different machines. A delayed message cannot make a version look newer, because its
token was sent before the message was written.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deltasync.base.clock import FOREVER_NS
from deltasync.base.decision import Decision
from deltasync.base.words import listed

logger = logging.getLogger(__name__)
# Bounds the queue of a callback that does not return.
_MOST_UNTOLD = 1_000


class Readiness:
    """The readiness of one replica.

    The subscriber's thread adds evidence. A separate thread reports changes, also when the limit expires.
    """

    def __init__(
        self,
        replica: str,
        on_change: Callable[[Decision], None] | None,
        clock: Callable[[], int],
        *,
        patience_seconds: float = 5.0,
    ) -> None:
        """Start the reporting thread. `close` waits at most `patience_seconds` for `on_change`."""
        self._replica = replica
        self._on_change = on_change
        self._clock = clock
        self._patience_seconds = patience_seconds
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
        """Wait until the replica is ready, its subscriber has stopped, or the time is over."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_seconds) or self.decision

    def note(self, **changes: Any) -> None:
        """Change fields of the `Evidence`."""
        with self._changed:
            self._evidence = replace(self._evidence, **changes)
            self._note()  # Now: a change must be reported even if the next one follows before the thread wakes up.
            self._changed.notify_all()

    def holds(self, newest: int | None, *, reset: bool = False) -> None:
        """Record new rows in the replica: see `Evidence.holding`."""
        with self._changed:
            held = self._evidence.holding(newest, reset=reset)
            self.note(newest_ns=held.newest_ns, lacking=held.lacking)

    def end(self, why: str) -> None:
        """Record why the subscriber has stopped. The first reason counts."""
        with self._changed:
            self.note(ended=self._evidence.ended or why)

    def close(self) -> None:
        """Report the last change and end the thread, unless a callback does not return. Call `end` before."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._patience_seconds)
            if self._thread.is_alive():
                text = "replica %s: on_readiness has not returned for %g s; the replica is closed without it"
                logger.warning(text, self._replica, self._patience_seconds)

    def _note(self) -> None:
        if (decision := self.decision).yes != self._ready:
            self._ready = decision.yes
            self._untold.append(decision)

    def _settled(self) -> Decision | None:
        decision = self.decision
        return decision if decision.yes or self._evidence.ended else None

    # The reporting thread.

    def _watch(self) -> None:
        closed = False
        while not closed:
            with self._changed:
                seconds = self._seconds_left()  # Before `_note`, because the limit may expire in between.
                self._note()
                if not self._closed and not self._untold:
                    self._changed.wait(seconds)  # Only once, because new evidence may shorten the wait.
                    self._note()
                decisions, closed = list(self._untold), self._closed
                self._untold.clear()
            for decision in decisions:
                self._tell(decision)

    def _seconds_left(self) -> float | None:
        """How long the replica stays ready without new evidence; None = without a limit."""
        evidence = self._evidence
        if evidence.newest_ns is None or evidence.limit_ns is None or not self.decision.yes:
            return None
        return max(0, evidence.newest_ns + evidence.limit_ns + 1 - self._clock()) / 1e9

    def _tell(self, decision: Decision) -> None:
        level = logging.INFO if decision.yes or self._evidence.ended else logging.WARNING
        state = "is ready" if decision.yes else "is no longer ready"
        logger.log(level, "replica %s %s: %s", self._replica, state, decision.reason)
        try:
            if self._on_change:
                self._on_change(decision)
        except Exception:  # An error of the callback must not end this thread.
            logger.exception("replica %s: on_readiness failed", self._replica)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a replica knows about the age of its rows. All times are its own, by `steady_ns`.

    Attributes:
        started_ns: when its subscriber was constructed.
        newest_ns: a time at which its rows were the newest; None = not known yet.
        limit_ns: how long ago that may be; None = any time since `started_ns`.
        lacking: why `newest_ns` cannot advance; empty if it can.
        wrong: tables whose rows differ from the service's.
        ended: why its subscriber has stopped; empty if it has not.
    """

    started_ns: int
    newest_ns: int | None = None
    limit_ns: int | None = None
    lacking: str = "it has not yet connected to the service"
    wrong: tuple[str, ...] = ()
    ended: str = ""

    def holding(self, newest_ns: int | None, *, reset: bool = False) -> "Evidence":
        """Evidence for new rows, which were the newest at `newest_ns` or later; None = unknown.

        `reset` means that the rows do not continue the previous ones. Otherwise they are newer.
        """
        before = None if reset else self.newest_ns
        times = [each for each in (before, newest_ns) if each is not None]
        lacking = "" if newest_ns is not None else "the service does not know how old these rows are"
        return replace(self, newest_ns=max(times, default=None), lacking=lacking)


def decide(evidence: Evidence, now_ns: int) -> Decision:
    """Decide whether a replica is ready at `now_ns`."""
    if evidence.ended:
        return Decision(False, evidence.ended)
    if evidence.wrong:
        return Decision(False, f"its rows differ from the service's in {listed(evidence.wrong)}")
    if evidence.newest_ns is None:
        return Decision(False, evidence.lacking)
    if evidence.limit_ns is None:
        if evidence.newest_ns >= evidence.started_ns:
            return Decision(True, "it has caught up since it started")
        return Decision(False, _with("it has not caught up since it started", evidence.lacking))
    ago_ns = max(0, now_ns - evidence.newest_ns)
    text = f"its rows were the newest {ago_ns / 1e9:.1f} s ago, the limit is {evidence.limit_ns / 1e9:.15g} s"
    return Decision(ago_ns <= evidence.limit_ns, _with(text, evidence.lacking))


def _with(text: str, lacking: str) -> str:
    return f"{text}; {lacking}" if lacking else text


def newest_ns(token_ns: int, behind_ns: int, opened_ns: int) -> int | None:
    """A time at which a message's version was the newest; None if the message does not show it.

    `token_ns` is the token in the message, 0 = none; the stream was opened at `opened_ns`, before the message was
    written. The service says that the version has been out of date for `behind_ns`.
    """
    return None if behind_ns >= FOREVER_NS else (token_ns or opened_ns) - behind_ns
