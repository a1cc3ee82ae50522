"""A look at all rows that a service keeps, at full speed, and what came of it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deltasync.core.damage import ranges
from deltasync.core.events import EventKind
from deltasync.feeds.damage import FROM_TRAINERS, Damage, IdsByTable, joined
from deltasync.service.service import Service

FROM_RELEASES = "the next release brings them whole"


@dataclass(frozen=True, kw_only=True)
class InspectedTable:
    """What was found of one table.

    Attributes:
        model: whose table it is.
        consumer: whose view holds it; empty where it is the model's own.
        table: its name.
        rows: so many were looked at.
        damaged: so many of them had other bits than were stored.
        restamped: so many had another stamp than was stored, or were to be sent although nothing said so: they are
            sent again.
        left: so many are damaged still.
        reason: which these are, and what becomes of them; empty where none is left.
    """

    model: str
    consumer: str
    table: str
    rows: int
    damaged: int
    restamped: int
    left: int
    reason: str = ""

    @property
    def mended(self) -> int:
        """So many are as they were stored again."""
        return self.damaged - self.left


async def inspect(service: Service, by: str) -> list[InspectedTable]:
    """Look at all rows of all models and views; mend what can be mended, and tell `by` whom that was asked for.

    Raises:
        ServiceUnavailable: a model is still recovering.
    """
    for each in service.recovering:
        service.check_recovered(each)
    found, end = list[InspectedTable](), ", and was broken off"
    try:
        for name, model in sorted(service.models.items()):
            found += await _inspected(model.damage, name, "", FROM_TRAINERS)
            for consumer, view in sorted(service.views.by_consumer().items()):
                if view.model is model:
                    found += await _inspected(view.damage, name, consumer, FROM_RELEASES, view.find_lost)
        end = ""
    finally:  # Whoever asks may leave: what was mended by then is.
        service.events.emit(EventKind.ROWS_INSPECTED, f"{_in_words(found)}{end}", by=by)
    return found


def _in_words(found: Sequence[InspectedTable]) -> str:
    counts = {
        "looked at": sum(each.rows for each in found),
        "damaged": sum(each.damaged for each in found),
        "with another stamp": sum(each.restamped for each in found),
        "left": sum(each.left for each in found),
    }
    return "of all rows, " + ", ".join(f"{count} {what}" for what, count in counts.items())


async def _none_lost() -> IdsByTable:
    return {}


async def _inspected(
    damage: Damage,
    model: str,
    consumer: str,
    remedy: str,
    find_lost: Callable[[], Awaitable[IdsByTable]] = _none_lost,
) -> list[InspectedTable]:
    look = await damage.look_at_all(f"model {model!r}" if not consumer else f"consumer {consumer!r}")
    await damage.mend()
    restamped, left = joined(look.restamped, await find_lost()), damage.rows
    found = joined(look.damaged, left)  # Some may have been found by others meanwhile.
    count = _counter(found), _counter(restamped), _counter(left)
    return [
        InspectedTable(
            model=model,
            consumer=consumer,
            table=table,
            rows=looked_at,
            damaged=count[0](table),
            restamped=count[1](table),
            left=count[2](table),
            reason=f"{ranges(left[table])}: {remedy}" if table in left else "",
        )
        for table, looked_at in look.rows.items()
    ]


def _counter(rows: IdsByTable) -> Callable[[str], int]:
    return lambda table: len(rows.get(table, ()))


def as_json(tables: Sequence[InspectedTable]) -> list[dict[str, Any]]:
    """The same, as it is written for programs."""
    return [{**vars(each), "mended": each.mended} for each in tables]
