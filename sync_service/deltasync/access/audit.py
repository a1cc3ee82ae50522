"""Who did what: one line for every admin call, every takeover and every refusal, in a log of its own."""

import asyncio
import logging
from collections import Counter

from deltasync.access.caller import CALL, Call, Role
from deltasync.base.errors import NotPermitted
from deltasync.base.events import Event, EventKind, Events, described, line_of
from deltasync.base.logs import FIELDS
from deltasync.base.words import printable

logger = logging.getLogger("deltasync.audit")

_LONGEST_LINE = 800
_TAKEN_OVER = frozenset({EventKind.RUN_SUPERSEDED, EventKind.REPLICA_TAKEN_OVER})
# Refusals of so many kinds are written down, of each the first in a while; the others are counted.
_KINDS = 100
_SECONDS = 60.0
# So many of them are among the recent events: others that happen are not to be crowded out.
_SHOWN = 10


class Audit:
    """Writes down who did what. A listener to what happens; used in the event loop."""

    def __init__(self, events: Events, seconds: float = _SECONDS) -> None:
        """Listen to what happens, and tell of refusals there, so that they are counted."""
        self._events = events
        self._seconds = seconds
        self._refused = Counter[tuple[str, ...]]()
        self._others = 0
        events.listen(self)

    def __call__(self, event: Event) -> None:
        """Note what a call has changed, by what it has told."""
        call = CALL.get()
        if call is None:
            return
        if event.kind in _TAKEN_OVER:
            _write(logging.WARNING, "taken over", call, line_of(event))
        elif "by" in event.subject:
            call.changes.append(line_of(event))

    def note(self, call: Call) -> None:
        """Note a call that has ended, if it is one that is written down."""
        if isinstance(call.error, NotPermitted):
            self.refused(call, call.error)
        elif call.role is Role.ADMIN and call.error:
            said = f"cancelled {call.error}" if not isinstance(call.error, Exception) else described(call.error)
            _write(logging.WARNING, "failed", call, said)
        elif call.role is Role.ADMIN:
            changes = "; ".join(call.changes) or "no consumer, model or table has changed"
            _write(logging.INFO, "done", call, changes)

    def refused(self, call: Call, error: NotPermitted) -> None:
        """Note a refusal. Of those alike that come within a while the first is written down, and how many more
        there were: a flood of them must not fill the disk.
        """
        if not self._refused:
            asyncio.get_running_loop().call_later(self._seconds, self._sum_up)
        kind = call.identity.address.rpartition(":")[0], call.identity.name, call.role.value if call.role else ""
        if kind not in self._refused and len(self._refused) >= _KINDS:
            self._others += 1
            self._events.emit(EventKind.CALL_REFUSED)
            return
        self._refused[kind] += 1
        if self._refused[kind] == 1:
            _write(logging.WARNING, "refused", call, str(error))
        if self._refused[kind] == 1 and len(self._refused) <= _SHOWN:
            who = call.identity
            subject = {"call": call.name, "address": who.address, "name": who.name or "-"}
            self._events.emit(EventKind.CALL_REFUSED, str(error), None, **subject)
        else:
            self._events.emit(EventKind.CALL_REFUSED)

    def _sum_up(self) -> None:
        for (address, name, role), number in self._refused.items():
            if number > 1:
                text = f"refused: {number - 1} more like it from address={address} name={name or '-'} role={role}"
                logger.warning("%s", printable(text, _LONGEST_LINE))
        if self._others:
            logger.warning("refused: %d more from other addresses or with other names", self._others)
        self._refused.clear()
        self._others = 0


def _write(level: int, what: str, call: Call, text: str) -> None:
    who = call.identity
    role, says = call.role.value if call.role else "-", f" by={call.says}" if call.says else ""
    line = f"{what}: role={role} name={who.name or '-'} address={who.address}{says} call={call.name}: {text}"
    fields = {"event": f"call_{what}", "role": role, "name": who.name, "address": who.address, "by": call.says}
    said = {FIELDS: {**fields, "call": call.name, "text": printable(text, _LONGEST_LINE)}}
    logger.log(level, "%s", printable(line, _LONGEST_LINE), extra=said)
