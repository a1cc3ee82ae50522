"""The last versions of a model, and the duration of each stage of their way to replicas."""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest

from deltasync.base.clock import steady_ns
from deltasync.base.words import utc
from deltasync.core.cut_times import CutTimes
from deltasync.model.model import Model

_DIGITS = 6


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of each stage of a cut; null until it ends. `release` and `ack` are the slowest consumer's."""

    gather: float | None = None
    send: float | None = None
    seal: float | None = None
    log: float | None = None
    apply: float | None = None
    release: float | None = None
    ack: float | None = None


@dataclass(frozen=True)
class DeliveryLine:
    """A version's delivery to `replicas` of a consumer; `release` and `ack` are the seconds of the slowest."""

    consumer: str
    replicas: int
    release: float
    ack: float


@dataclass(frozen=True)
class VersionLine:
    """A version of a model that was sealed since the service started; `sealed` is the time in UTC."""

    model: str
    version: int
    step: int
    run: str
    rows: int
    bytes: int
    sealed: str
    seconds_ago: float
    seconds: PartSeconds
    consumers: list[DeliveryLine]


# The name of a model, and a cut of it.
NamedCuts = list[tuple[str, CutTimes]]


def last_cuts(models: Iterable[Model], count: int) -> NamedCuts:
    """Copies of the last cuts of several models, for another thread. In the event loop."""
    cuts = ((model.name, cut) for model in models for cut in model.recent.newest(count))
    return [(name, cut.copy()) for name, cut in nlargest(count, cuts, key=lambda pair: pair[1].durable_ns)]


def version_lines(cuts: NamedCuts) -> list[VersionLine]:
    """Build a line for each cut. Any thread."""
    now_ns = steady_ns()
    return [_line(*each, now_ns) for each in cuts]


def _line(model: str, cut: CutTimes, now_ns: int) -> VersionLine:
    deliveries = [
        DeliveryLine(name, each.replicas, round(each.release, _DIGITS), round(each.ack, _DIGITS))
        for name, each in sorted(cut.deliveries.items())
    ]
    return VersionLine(
        model=model,
        version=cut.seal.version,
        step=cut.seal.step,
        run=cut.seal.run,
        rows=cut.seal.rows,
        bytes=cut.seal.bytes,
        sealed=utc(cut.seal.sealed_unix_ns),
        seconds_ago=round((now_ns - cut.durable_ns) / 1e9, 3),
        seconds=_seconds(cut, deliveries),
        consumers=deliveries,
    )


def _seconds(cut: CutTimes, deliveries: list[DeliveryLine]) -> PartSeconds:
    parts = {name: round(seconds, _DIGITS) for name, seconds in cut.seconds.items()}
    if deliveries:
        slowest = max(deliveries, key=lambda each: each.release + each.ack)
        parts |= {"release": slowest.release, "ack": slowest.ack}
    return PartSeconds(**parts)
