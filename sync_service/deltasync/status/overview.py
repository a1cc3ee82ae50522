"""The overview of a service that the page, `deltasync status` and `/readyz` show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from deltasync.access.rights import Access
from deltasync.base.clock import steady_ns
from deltasync.base.events import RecentEvent
from deltasync.base.progress import under_way
from deltasync.base.words import utc
from deltasync.cluster.owners import Owners
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.cut_times import DeliveryDurations
from deltasync.cuts.coordinator import CutCoordinator, RankStream
from deltasync.log.volume import Volume
from deltasync.model.model import Model
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models
from deltasync.status.lag import ConsumerLag, State, needs_somebody
from deltasync.status.readiness import Check, checks, troubles
from deltasync.status.sources import Sources
from deltasync.status.versions import VersionLine


@dataclass(frozen=True)
class ProbeLine:
    """Results of the probe, which sends rows from the service's own publisher to its own replica.

    The last row arrived `age_seconds` ago and took `seconds`. `trouble` is why the probe fails; empty if it works.
    """

    seconds: float | None
    age_seconds: float
    turns: int
    failures: int
    trouble: str


@dataclass(frozen=True)
class VolumeOverview:
    """A volume that a process writes to.

    `free_bytes` is null for brokers. `refused` is why the volume refuses writes; empty if it accepts them.
    """

    volume: str
    free_bytes: int | None
    refused: str


def volume_overviews(volumes: Sequence[Volume]) -> list[VolumeOverview]:
    """The volumes that this process writes to. Asks the operating system; any thread."""
    return [
        VolumeOverview(each.name, each.free_bytes, each.refusal.in_words if each.refusal else each.trouble)
        for each in volumes
    ]


@dataclass(frozen=True)
class ProcessOverview:
    """A process of the service.

    `ready` is the result of its `/readyz`; `troubles` are problems that do not affect it. `work` is the progress
    of long operations. `probe` is null if there is no probe.
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


def process_overview(sources: Sources, volumes: list[VolumeOverview], access: Access | None) -> ProcessOverview:
    """This process. In the event loop."""
    every, me, probe = checks(sources), sources.models.owners.me, sources.process.probe
    return ProcessOverview(
        process=me.name,
        grpc=me.grpc,
        started=utc(sources.process.started_unix_ns),
        ready=all(each.ok for each in every),
        checks=every,
        troubles=[*(access.troubles if access else ()), *troubles(sources)],
        work=under_way(),
        probe=ProbeLine(*(getattr(probe, each.name) for each in fields(ProbeLine))) if probe else None,
        volumes=volumes,
    )


def other_processes(owners: Owners) -> list[str]:
    """The names of the other processes that are alive. In the event loop."""
    return sorted(each.name for each in owners.processes() if each.name != owners.me.name)


@dataclass(frozen=True)
class ModelOverview:
    """A model and its trainer.

    `ranks` counts the ranks of its run, `connected` those with a stream, `finished` those that said goodbye.
    `published_rows` and `published_bytes` count cuts since the service started; `bytes` is the size of its tables.
    `trouble` says why its cuts cannot be sealed, that no process owns it, or that it is recovering; otherwise it
    is empty. Unknown numbers are null.
    """

    model: str
    head: int | None
    step: int | None
    seconds_since_cut: float | None
    run: str
    ranks: int
    connected: int
    finished: int
    tables: int | None
    bytes: int | None
    published_rows: int
    published_bytes: int
    trouble: str


def model_overviews(models: Models) -> list[ModelOverview]:
    """The models of this process, by name, with those that are recovering and those that no process owns.

    In the event loop.
    """
    lost = dict.fromkeys(unowned_models(models), "no live process owns this model")
    without = lost | {name: _still_recovering(models, name) for name in models.recovering}
    lines = {
        name: ModelOverview(name, None, None, None, "", 0, 0, 0, None, None, 0, 0, why)
        for name, why in without.items()
    }
    lines |= {name: _model(model, models.coordinators.get(name)) for name, model in models.items()}
    return [lines[name] for name in sorted(lines)]


def unowned_models(models: Models) -> list[str]:
    """The models that have no owner, as far as this process knows. In the event loop."""
    owners = models.owners
    return [each for each in owners.models() if each not in models and owners.owner_of(each) is None]


def _still_recovering(models: Models, model: str) -> str:
    if reason := models.reload_reason(model):
        return f"being reloaded: {reason}"
    why = models.waits_for(model)
    return f"still recovering: {why}" if why else "still recovering"


def _model(model: Model, coordinator: CutCoordinator | None) -> ModelOverview:
    newest = model.seals.newest
    run = coordinator.run if coordinator else None
    return ModelOverview(
        model=model.name,
        head=model.seals.newest_version,
        step=newest.step if newest else 0,
        seconds_since_cut=model.seals.succession.seconds_since(newest.version, steady_ns()) if newest else None,
        run=coordinator.run_id if coordinator else "",
        ranks=run.world_size if run else 0,
        connected=len(coordinator.connected) if coordinator else 0,
        finished=sum(each.finished for each in coordinator.sessions.values()) if coordinator else 0,
        tables=len(model.tables),
        bytes=sum(table.spec.nbytes for table in model.tables),
        published_rows=coordinator.rows if coordinator else 0,
        published_bytes=coordinator.bytes if coordinator else 0,
        trouble=model.failure or (_kept_from_sealing(coordinator) if coordinator else ""),
    )


def _kept_from_sealing(coordinator: CutCoordinator) -> str:
    """Why a model's cuts cannot be sealed, in words; empty if they can."""
    return coordinator.quarantine or (coordinator.refusal.reason if coordinator.refusal else "")


RankState = Literal["connected", "away", "finished"]


@dataclass(frozen=True)
class TrainerLine:
    """A rank of a run that publishes a model.

    Attributes:
        model: the model's name.
        run: the run's id.
        ranks: number of ranks of the run.
        rank: number of this rank.
        process: the name that the rank's process gives itself.
        connected: whether it is connected.
        finished: whether it said goodbye. A rank that is not connected and did not say goodbye is lost.
        since_seconds: seconds since it connected, or left.
        left: why its last stream ended; empty while it is connected.
        tables: number of tables that it publishes.
    """

    model: str
    run: str
    ranks: int
    rank: int
    process: str
    connected: bool
    finished: bool
    since_seconds: float
    left: str
    tables: int


def rank_state(session: RankStream) -> RankState:
    """The state of a rank; `away` is one that left without a goodbye."""
    return "finished" if session.finished else "away" if session.ended else "connected"


def trainer_lines(coordinators: Mapping[str, CutCoordinator]) -> list[TrainerLine]:
    """The ranks of all models, including those that left since the service started. In the event loop."""
    return [line for name in sorted(coordinators) for line in _ranks(name, coordinators[name])]


def _ranks(name: str, coordinator: CutCoordinator) -> list[TrainerLine]:
    now = steady_ns()
    return [
        TrainerLine(
            model=name,
            run=coordinator.run_id,
            ranks=coordinator.run.world_size if coordinator.run else 0,
            rank=rank,
            process=each.process,
            connected=not each.ended,
            finished=each.finished,
            since_seconds=round((now - each.since_ns) / 1e9, 3),
            left=each.left,
            tables=len(each.tables),
        )
        for rank, each in sorted(coordinator.sessions.items())
    ]


@dataclass(frozen=True)
class Freshness:
    """Seconds from the end of a step until replicas had its rows.

    `p50` and `p99` are of the last `count` deliveries, at most 500. `counts` is the histogram of all deliveries
    since the service started, with the bounds `freshness_bounds`; its last entry counts longer ones.
    """

    counts: list[int]
    count: int
    p50: float | None = None
    p99: float | None = None


def freshness_of(durations: DeliveryDurations) -> Freshness:
    """The freshness of a consumer's replicas."""
    shares = (durations.within(share) for share in (0.5, 0.99))
    p50, p99 = (None if seconds is None else round(seconds, 4) for seconds in shares)
    return Freshness(list(durations.freshness.read()[0]), len(durations.recent), p50, p99)


@dataclass(frozen=True)
class WrongReplica:
    """A replica that needs an operator's attention, and why."""

    replica: str
    reason: str


@dataclass(frozen=True)
class ConsumerOverview:
    """A consumer: its lag, its policy in words, and its replicas.

    `wrong` lists the replicas that need attention. Numbers are null until this process has loaded the model.
    """

    consumer: str
    model: str
    state: State
    reason: str
    head: int | None
    offset: int | None
    versions: int | None
    rows: int | None
    bytes: int | None
    seconds: float | None
    unsent_norm: float | None
    unsent_share: float | None
    replicas: int
    connected: int
    wrong: list[WrongReplica]
    released_rows: int
    released_bytes: int
    freshness: Freshness
    policy: str


# The numbers of a lag that a consumer's overview and history contain.
LAG_NUMBERS = ("versions", "rows", "bytes", "seconds", "unsent_norm", "unsent_share")


def consumer_overviews(
    models: Models, registry: ConsumerRegistry, lags: Iterable[ConsumerLag]
) -> list[ConsumerOverview]:
    """The consumers of this process, by name, with those of recovering models. In the event loop."""
    lines = {each.consumer: _consumer(registry.consumers.get(each.consumer), each) for each in lags}
    for model in models.recovering:
        failed = models.waits_for(model) or models.reload_reason(model)
        state: State = "failed" if failed else "waiting"
        for each in registry.of_model(model):
            lines.setdefault(each.name, _waiting(each.name, model, state, _still_recovering(models, model)))
    for name, model in _coming_consumers(models.owners, registry):
        lines.setdefault(name, _waiting(name, model, "waiting", "this process is taking it over"))
    return [lines[name] for name in sorted(lines)]


def _coming_consumers(owners: Owners, registry: ConsumerRegistry) -> Iterator[tuple[str, str]]:
    """Name and model of each consumer whose model this process owns and has not loaded yet."""
    for model in owners.models():
        owner = owners.owner_of(model)
        if owner and owner.process == owners.me.name:
            yield from ((name, model) for name in owners.consumers_of(model) if name not in registry.consumers)


def _consumer(consumer: Consumer | None, lag: ConsumerLag) -> ConsumerOverview:
    return ConsumerOverview(
        consumer=lag.consumer,
        model=lag.model,
        state=lag.state,
        reason=lag.reason,
        head=lag.head,
        offset=lag.offset,
        **{name: getattr(lag.lag, name) for name in LAG_NUMBERS},
        replicas=len(lag.fleet),
        connected=sum(each.connected for each in lag.fleet),
        wrong=[WrongReplica(each.replica, each.reason) for each in lag.fleet if needs_somebody(each)],
        released_rows=consumer.released_rows if consumer else 0,
        released_bytes=consumer.released_bytes if consumer else 0,
        freshness=freshness_of(consumer.durations if consumer else DeliveryDurations()),
        policy=consumer.policy.words if consumer else "",
    )


def _waiting(consumer: str, model: str, state: State, why: str) -> ConsumerOverview:
    return ConsumerOverview(
        consumer=consumer,
        model=model,
        state=state,
        reason=f"model {model!r} is not available: {why}",
        **dict.fromkeys(("head", "offset", *LAG_NUMBERS)),
        replicas=0,
        connected=0,
        wrong=[],
        released_rows=0,
        released_bytes=0,
        freshness=freshness_of(DeliveryDurations()),
        policy="",
    )


@dataclass(frozen=True)
class KeptOverview:
    """A kept version of a model, sealed `seconds_ago`; `name` may be empty.

    `bytes` is the size of the files of its checkpoint. `followers` are the consumers that follow it.
    """

    model: str
    version: int
    name: str
    seconds_ago: float
    bytes: int
    followers: list[str]


def kept_overviews(versions: Versions, count: int, now_unix_ns: int) -> list[KeptOverview]:
    """At most `count` kept versions of this process's models, newest first, as far as they have been read.

    Versions that a consumer follows come before others, then those with a name. In the event loop.
    """
    listed = versions.listed()
    followers = {model: versions.followers_of(model) for model in listed}
    lines = [
        KeptOverview(
            model=each.model,
            version=each.version,
            name=each.name,
            seconds_ago=round(max(0, now_unix_ns - each.seal.sealed_unix_ns) / 1e9, 3),
            bytes=each.bytes,
            followers=followers[each.model].get(each.id, []),
        )
        for kept in listed.values()
        for each in kept
    ]
    chosen = sorted(lines, key=lambda line: (not line.followers, not line.name, line.seconds_ago))[:count]
    return sorted(chosen, key=lambda line: line.seconds_ago)


@dataclass(frozen=True)
class Overview:
    """The state of a process at `unix_ms`, milliseconds since 1970.

    `missing` names the other live processes: each has its own overview.
    """

    unix_ms: int
    freshness_bounds: list[float]
    processes: list[ProcessOverview]
    missing: list[str]
    models: list[ModelOverview]
    trainers: list[TrainerLine]
    consumers: list[ConsumerOverview]
    cuts: list[VersionLine]
    kept: list[KeptOverview]
    events: list[RecentEvent]
