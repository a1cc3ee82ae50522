"""The parts of a service from which its status is computed."""

import asyncio
import time
from dataclasses import dataclass, field

from deltasync.access.limits import Limits
from deltasync.base.events import EventCounts, RecentEvents
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.consumers import Consumers
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models
from deltasync.service.self_test import ProbeStatus
from deltasync.service.volumes import Volumes

# How many cuts, kept versions and events an overview shows.
CUTS, KEPT, EVENTS = 20, 50, 30


@dataclass(kw_only=True)
class ProcessState:
    """The state of this process, kept up to date by the server.

    Attributes:
        draining: set when the service begins to shut down.
        started_unix_ns: when the process started, nanoseconds since 1970.
        compiling: whether kernels are still being compiled; streams are refused meanwhile.
        probe: results of the probe; None if there is no probe.
        certificates_expire: when each certificate expires, seconds since 1970, by the name of its setting.
    """

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
