"""The last versions of a model, and the duration of each stage of their way to replicas."""

from collections.abc import Iterable
from heapq import nlargest

from deltasync.base.clock import steady_ns
from deltasync.base.words import utc
from deltasync.core.cut_times import CutTimes
from deltasync.model.model import Model
from deltasync.status.records import Delivery, StageSeconds, VersionStatus

_DIGITS = 6


# The name of a model, and a cut of it.
NamedCuts = list[tuple[str, CutTimes]]


def last_cuts(models: Iterable[Model], count: int) -> NamedCuts:
    """Copies of the last cuts of several models, for another thread. In the event loop."""
    cuts = ((model.name, cut) for model in models for cut in model.recent.newest(count))
    return [(name, cut.copy()) for name, cut in nlargest(count, cuts, key=lambda pair: pair[1].durable_ns)]


def version_statuses(cuts: NamedCuts) -> list[VersionStatus]:
    """Build a line for each cut. Any thread."""
    now_ns = steady_ns()
    return [_version(*each, now_ns) for each in cuts]


def _version(model: str, cut: CutTimes, now_ns: int) -> VersionStatus:
    deliveries = [
        Delivery(name, each.replicas, round(each.release, _DIGITS), round(each.ack, _DIGITS))
        for name, each in sorted(cut.deliveries.items())
    ]
    return VersionStatus(
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


def _seconds(cut: CutTimes, deliveries: list[Delivery]) -> StageSeconds:
    parts = {name: round(seconds, _DIGITS) for name, seconds in cut.seconds.items()}
    if deliveries:
        slowest = max(deliveries, key=lambda each: each.release + each.ack)
        parts |= {"release": slowest.release, "ack": slowest.ack}
    return StageSeconds(**parts)
