"""A process: the parts of its service that status reads, and whether it is ready."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from deltasync.access.limits import Limits
from deltasync.base.events import EventCounts, RecentEvents
from deltasync.base.words import listed
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.consumers import Consumers, ProbeStatus
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models
from deltasync.service.volumes import Volumes
from deltasync.status.records import Check

# How many cuts, kept versions and events an overview shows.
CUTS, KEPT, EVENTS = 20, 50, 30


@dataclass(kw_only=True)
class ProcessState:
    """The state of this process, kept up to date by the server."""

    draining: asyncio.Event
    started_unix_ns: int = field(default_factory=time.time_ns)
    compiling: bool = False
    probe: ProbeStatus | None = None
    certificates_expire: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The parts of a service that status reads and never changes."""

    models: Models
    registry: ConsumerRegistry
    consumers: Consumers
    checkpoints: Checkpoints
    versions: Versions
    volumes: Volumes
    limits: Limits
    event_counts: EventCounts
    recent_events: RecentEvents
    process: ProcessState


def checks(sources: Sources) -> list[Check]:
    """All checks, in the order in which a starting process passes them. In the event loop."""
    models, process, volumes = sources.models, sources.process, sources.volumes.trouble
    compiling = "compiling kernels for this machine; the log shows the progress"
    return [
        Check("running", "the service is shutting down" if process.draining.is_set() else ""),
        Check("kernels", compiling if process.compiling else ""),
        Check("processes", "" if models.owners.confirmed else _UNCONFIRMED),
        Check("models", _recovering(models)),
        Check("volumes", f"a volume refuses writes: {volumes}" if volumes else ""),
        Check("log", "; ".join([_FULL, *sources.checkpoints.troubles]) if models.storage.logs.refusing else ""),
    ]


def _recovering(models: Models) -> str:
    reloading, failures = sorted(models.reloading), {**models.recovery_failures, **models.stuck}
    texts = [f"model {name!r} is being reloaded: {models.reload_reason(name)}" for name in reloading]
    away = [name for name in models.recovering if name not in reloading]
    texts += [f"model {name!r} is still recovering: {failures[name]}" for name in away if failures.get(name)]
    if recovering := [name for name in away if not failures.get(name)]:
        texts.append(f"still recovering: {listed(recovering)}")
    return "; ".join(texts)


_FULL = "the log is full; the next checkpoint frees space"


_UNCONFIRMED = "the brokers have not confirmed this process's lease: it is starting, or they do not answer"


# A failure of one of these explains those of all later checks.
_ALONE = ("running", "kernels", "processes")


def not_ready(every: Iterable[Check]) -> str:
    """Why the service accepts no streams or cannot store their data; empty if it is ready."""
    wrong = [each for each in every if not each.ok]
    if wrong and wrong[0].check in _ALONE:
        return wrong[0].trouble
    # A full log is a consequence of the other failures.
    causes = [each for each in wrong if each.check != "log"] or wrong
    return "; ".join(each.trouble for each in causes)


def troubles(sources: Sources) -> list[str]:
    """Problems of this process that do not keep it from being ready. In the event loop."""
    risks = [f"accepted risk: {each}" for each in sources.models.storage.logs.accepted_risks]
    return [*sources.models.troubles, *sources.consumers.troubles, *risks, *sources.checkpoints.troubles]
