"""The audit log: one line for each admin call, takeover and refusal."""

import asyncio
import logging
from collections import Counter

from deltasync.access.roles import CALL, Call, Role
from deltasync.base.errors import NotPermitted
from deltasync.base.events import Event, EventKind, Events, error_text, event_line
from deltasync.base.logs import FIELDS
from deltasync.base.words import printable

_audit_log = logging.getLogger("deltasync.audit")


_LONGEST_LINE = 800


_TAKEN_OVER = frozenset({EventKind.RUN_SUPERSEDED, EventKind.REPLICA_TAKEN_OVER})


# Kinds of refusals to log per period, in seconds. The audit logs the first of each kind and counts the others.
_REFUSAL_KINDS, _REFUSAL_SECONDS = 100, 60.0


# Refusals per period to show as events, as more would crowd out other events.
_SHOWN_REFUSALS = 10


class Audit:
    """Logs each admin call, takeover and refusal. For the event loop."""

    def __init__(self, events: Events, seconds: float = _REFUSAL_SECONDS) -> None:
        """Listen to `events` and emit refusals there, which counts them."""
        self._events = events
        self._seconds = seconds
        self._refused = Counter[tuple[str, ...]]()
        self._others = 0
        events.listen(self)

    def __call__(self, event: Event) -> None:
        """Record a change made by the current call."""
        call = CALL.get()
        if call is None:
            return
        if event.kind in _TAKEN_OVER:
            _write_line(logging.WARNING, "taken over", call, event_line(event))
        elif "by" in event.subject:
            call.changes.append(event_line(event))

    def note(self, call: Call) -> None:
        """Log the end of a call if it was refused or required role admin."""
        if isinstance(call.error, NotPermitted):
            self.refused(call, call.error)
        elif call.role is Role.ADMIN and call.error:
            error = call.error
            text = error_text(error) if isinstance(error, Exception) else f"cancelled {error}"
            _write_line(logging.WARNING, "failed", call, text)
        elif call.role is Role.ADMIN:
            changes = "; ".join(call.changes) or "no consumer, model or table changed"
            _write_line(logging.INFO, "done", call, changes)

    def refused(self, call: Call, error: NotPermitted) -> None:
        """Log a refusal. Similar ones in the same minute are only counted: a flood must not fill the disk."""
        if not self._refused:
            asyncio.get_running_loop().call_later(self._seconds, self._sum_up)
        kind = call.identity.address.rpartition(":")[0], call.identity.name, call.role.value if call.role else ""
        if kind not in self._refused and len(self._refused) >= _REFUSAL_KINDS:
            self._others += 1
            self._events.emit(EventKind.CALL_REFUSED)
            return
        self._refused[kind] += 1
        if self._refused[kind] == 1:
            _write_line(logging.WARNING, "refused", call, str(error))
        if self._refused[kind] == 1 and len(self._refused) <= _SHOWN_REFUSALS:
            who = call.identity
            subject = {"call": call.name, "address": who.address, "name": who.name or "-"}
            self._events.emit(EventKind.CALL_REFUSED, str(error), None, **subject)
        else:
            self._events.emit(EventKind.CALL_REFUSED)

    def _sum_up(self) -> None:
        for (address, name, role), number in self._refused.items():
            if number > 1:
                text = f"refused: {number - 1} more like it from address={address} name={name or '-'} role={role}"
                _audit_log.warning("%s", printable(text, _LONGEST_LINE))
        if self._others:
            _audit_log.warning("refused: %d more from other addresses or with other names", self._others)
        self._refused.clear()
        self._others = 0


def _write_line(level: int, what: str, call: Call, text: str) -> None:
    who = call.identity
    role, says = call.role.value if call.role else "-", f" by={call.says}" if call.says else ""
    line = f"{what}: role={role} name={who.name or '-'} address={who.address}{says} call={call.name}: {text}"
    event = "call_" + what.replace(" ", "_")
    fields = {"event": event, "role": role, "name": who.name, "address": who.address, "by": call.says}
    extra = {FIELDS: {**fields, "call": call.name, "text": printable(text, _LONGEST_LINE)}}
    _audit_log.log(level, "%s", printable(line, _LONGEST_LINE), extra=extra)
