"""What status is computed from: the models, consumers and limits of a service, and its process."""

import asyncio
import time
from dataclasses import dataclass, field

from deltasync.access.limits import Limits
from deltasync.base.events import EventCounts, RecentEvents
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.consumers import Consumers
from deltasync.service.models import Models
from deltasync.service.self_test import ProbeStatus
from deltasync.service.volumes import Volumes

# How many cuts and events an overview shows.
CUTS, EVENTS = 20, 30


@dataclass(kw_only=True)
class ProcessState:
    """How this process is doing. The server keeps it up to date.

    Attributes:
        draining: set once the service is to end.
        started_unix_ns: when the process started, nanoseconds since 1970.
        compiling: whether kernels are still compiled, and no streams are accepted.
        probe: how rows of the probe fare; None if there is no probe.
        certificates_expire: when each certificate expires, seconds since 1970, by the name of its setting.
    """

    draining: asyncio.Event
    started_unix_ns: int = field(default_factory=time.time_ns)
    compiling: bool = False
    probe: ProbeStatus | None = None
    certificates_expire: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What status reads of a service, and changes nothing of."""

    models: Models
    registry: ConsumerRegistry
    consumers: Consumers
    checkpoints: Checkpoints
    volumes: Volumes
    limits: Limits
    event_counts: EventCounts
    recent_events: RecentEvents
    process: ProcessState
