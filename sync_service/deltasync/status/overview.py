"""Everything of a service on one screen: what the page and `deltasync status` show."""

from collections.abc import Sequence
from dataclasses import dataclass

from deltasync.core.cut_times import DeliveryDurations
from deltasync.core.policy import Policy
from deltasync.core.probe_status import ProbeStatus
from deltasync.core.progress import under_way
from deltasync.core.recent_events import RecentEvent
from deltasync.core.steady_clock import steady_ns
from deltasync.core.words import utc
from deltasync.service.service import Service
from deltasync.status.lag import ConsumerLag
from deltasync.status.readiness import Check, checks
from deltasync.status.trainers import TrainerLine
from deltasync.status.versions import VersionLine, version_lines
from deltasync.storage.volume import Volume

CUTS, EVENTS = 20, 30
# States in which replicas hold, or are about to hold, what there is; of others somebody should know.
GOOD_STATES = frozenset({"in sync", "current", "delivered", "behind"})


@dataclass(frozen=True)
class ProbeLine:
    """What has become of rows that go all the way from a publisher to a replica, both of the service's own: the
    `seconds` of the last one, and how long ago that was; `trouble` says why the next one did not, if it did not.
    """

    seconds: float | None
    age_seconds: float
    turns: int
    failures: int
    trouble: str


@dataclass(frozen=True)
class VolumeOverview:
    """Where a process writes to: what is left for it, null of brokers, and what it refuses; `refused` is empty if
    it does not.
    """

    volume: str
    free_bytes: int | None
    refused: str


@dataclass(frozen=True)
class ProcessOverview:
    """A process of the service: `ready` is what its `/readyz` says, and `troubles` what lacks all the same.
    `work` is what takes long just now, and how far it is; `probe` is null where none goes on.
    """

    process: str
    grpc: str
    started: str
    ready: bool
    checks: list[Check]
    troubles: list[str]
    work: list[str]
    probe: ProbeLine | None
    volumes: list[VolumeOverview]


@dataclass(frozen=True)
class ModelOverview:
    """A model and its trainer. `published_rows` and `published_bytes` are of cuts since the service started;
    `bytes` those of its tables' values. `trouble` says what keeps cuts from being sealed; empty if nothing does.
    """

    model: str
    head: int
    step: int
    seconds_since_cut: float | None
    run: str
    ranks: int
    connected: int
    tables: int
    bytes: int
    published_rows: int
    published_bytes: int
    trouble: str


@dataclass(frozen=True)
class Freshness:
    """Seconds from the end of a step until replicas held it: `p50` and `p99` of the last 500 deliveries, of which
    there are `count`. `counts` are of all since the service started, by `freshness_bounds`; last, of longer ones.
    """

    counts: list[int]
    count: int
    p50: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class ConsumerOverview:
    """A consumer, in the list of all: its lag, and how many replicas it has. `policy` is in words. `wrong` names
    the replicas of which somebody should know.
    """

    consumer: str
    model: str
    state: str
    reason: str
    head: int
    offset: int
    versions: int
    rows: int
    bytes: int
    seconds: float
    unsent_norm: float | None
    unsent_share: float | None
    replicas: int
    connected: int
    wrong: list[str]
    released_rows: int
    released_bytes: int
    freshness: Freshness
    policy: str


@dataclass(frozen=True)
class Overview:
    """A service at one moment; `unix_ms` is when that was, milliseconds since 1970. `missing` names the processes
    of which nothing is in it.
    """

    unix_ms: int
    freshness_bounds: list[float]
    processes: list[ProcessOverview]
    missing: list[str]
    models: list[ModelOverview]
    trainers: list[TrainerLine]
    consumers: list[ConsumerOverview]
    cuts: list[VersionLine]
    events: list[RecentEvent]


def consumer_overview(service: Service, lag: ConsumerLag) -> ConsumerOverview:
    """A consumer's line, of its lag. In the event loop."""
    consumer = service.registry.consumers.get(lag.consumer)
    return ConsumerOverview(
        consumer=lag.consumer,
        model=lag.model,
        state=lag.state,
        reason=lag.reason,
        head=lag.head,
        offset=lag.offset,
        versions=lag.lag.versions,
        rows=lag.lag.rows,
        bytes=lag.lag.bytes,
        seconds=lag.lag.seconds,
        unsent_norm=lag.lag.unsent_norm,
        unsent_share=lag.lag.unsent_share,
        replicas=len(lag.fleet),
        connected=sum(each.connected for each in lag.fleet),
        wrong=[each.replica for each in lag.fleet if not each.connected or each.damaged or each.waits_for],
        released_rows=consumer.released_rows if consumer else 0,
        released_bytes=consumer.released_bytes if consumer else 0,
        freshness=freshness_of(consumer.durations if consumer else DeliveryDurations()),
        policy=Policy.from_dict(lag.policy).words,
    )


def freshness_of(durations: DeliveryDurations) -> Freshness:
    """How fresh what a consumer's replicas were given was."""
    found, (counts, _) = sorted(durations.recent), durations.freshness.read()
    if not found:
        return Freshness(list(counts), 0)
    return Freshness(
        list(counts), len(found), *(round(found[int(share * (len(found) - 1))], 4) for share in (0.5, 0.99))
    )


def model_overviews(service: Service) -> list[ModelOverview]:
    """The models. In the event loop."""
    return [_model(service, name) for name in sorted(service.models)]


def _model(service: Service, name: str) -> ModelOverview:
    model, coordinator = service.models[name], service.coordinators[name]
    newest, sealer = model.seals.newest, coordinator.sealer
    refused = sealer.refusal.reason if sealer.refusal else ""
    since = model.succession.seconds_since(newest.version, steady_ns()) if newest else None
    return ModelOverview(
        model=name,
        head=model.seals.newest_version,
        step=newest.step if newest else 0,
        seconds_since_cut=since,
        run=coordinator.run_id,
        ranks=coordinator.run.world_size if coordinator.run else 0,
        connected=len(coordinator.connected),
        tables=len(model.tables),
        bytes=sum(table.spec.nbytes for table in model.tables),
        published_rows=sealer.rows,
        published_bytes=sealer.bytes,
        trouble=model.failure or sealer.quarantine or refused,
    )


def recent_cuts(service: Service, count: int) -> list[VersionLine]:
    """The last cuts of all models, the newest first. In the event loop."""
    lines = [line for name in service.models for line in version_lines(service.models[name], count)]
    return sorted(lines, key=lambda line: line.seconds_ago)[:count]


def troubles(service: Service) -> list[str]:
    """What a process lacks, although it may be ready. In the event loop."""
    snapshots = service.snapshots.troubles if service.snapshots else []
    risks = [f"accepted: {each}" for each in service.logs.accepted_risks]
    return [*service.shortcomings, *risks, *snapshots]


def process_overview(service: Service, volumes: list[VolumeOverview]) -> ProcessOverview:
    """This process. In the event loop."""
    found, me = checks(service), service.owners.me
    return ProcessOverview(
        process=me.name,
        grpc=me.grpc,
        started=utc(service.started_unix_ns),
        ready=all(each.ok for each in found),
        checks=found,
        troubles=troubles(service),
        work=under_way(),
        probe=_probe(service.probe) if service.probe else None,
        volumes=volumes,
    )


def other_processes(service: Service) -> list[str]:
    """The names of those that are alive, besides this one. In the event loop."""
    owners = service.owners
    return sorted(each.name for each in owners.processes() if each.name != owners.me.name)


def _probe(probe: ProbeStatus) -> ProbeLine:
    return ProbeLine(probe.seconds, probe.age_seconds, probe.turns, probe.failures, probe.trouble)


def volume_overviews(volumes: Sequence[Volume]) -> list[VolumeOverview]:
    """Where it writes to. Asks the system; any thread."""
    return [
        VolumeOverview(each.name, each.free_bytes, each.refusal.in_words if each.refusal else each.trouble)
        for each in volumes
    ]
