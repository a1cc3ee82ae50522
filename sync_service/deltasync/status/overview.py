"""Everything of a service on one screen: what the page, `deltasync status` and `/readyz` show."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deltasync.base.clock import steady_ns
from deltasync.base.events import RecentEvent
from deltasync.base.progress import under_way
from deltasync.base.words import listed, utc
from deltasync.core.seal import DeliveryDurations
from deltasync.log.volume import Volume
from deltasync.service.probe import ProbeStatus
from deltasync.service.service import Service
from deltasync.status.lag import ConsumerLag, State
from deltasync.status.report import needs_somebody
from deltasync.status.trainers import TrainerLine, VersionLine


@dataclass(frozen=True)
class Check:
    """One thing that has to be right: its name, and why it is not; empty if it is."""

    check: str
    trouble: str

    @property
    def ok(self) -> bool:
        """Whether it is."""
        return not self.trouble


def checks(service: Service) -> list[Check]:
    """All of them, in the order in which they come to be right."""
    volumes, compiling = service.volumes.trouble, "still compiling for this machine; the log says how far it is"
    return [
        Check("running", "the service is shutting down" if service.draining.is_set() else ""),
        Check("kernels", compiling if service.compiling else ""),
        Check("processes", "" if service.owners.confirmed else _UNCONFIRMED),
        Check("models", _recovering(service)),
        Check("volumes", f"nothing new can be written: {volumes}" if volumes else ""),
        Check("log", "; ".join([_FULL, *service.checkpoints.troubles]) if service.logs.refusing else ""),
    ]


def _recovering(service: Service) -> str:
    reloading, failed = sorted(service.reloading.reasons), service.recovery_failures
    found = [f"model {name!r} is being reloaded: {service.reloading.reason(name)}" for name in reloading]
    away = [name for name in service.recovering if name not in reloading]
    found += [f"model {name!r} is still recovering: {failed[name]}" for name in away if failed.get(name)]
    recovering = [name for name in away if not failed.get(name)]
    return "; ".join(found + ([f"still recovering: {listed(recovering)}"] if recovering else []))


_FULL = "the log is full: it is cut once a checkpoint is written"
_UNCONFIRMED = "the other processes have not heard of this one: brokers do not answer, or have just been asked"
# These alone are the reason, whatever else is wrong.
_ALONE = ("running", "kernels", "processes")


def not_ready(found: Iterable[Check]) -> str:
    """Why the service takes no streams, or can keep nothing of what they bring; empty if it can."""
    wrong = [each for each in found if not each.ok]
    if wrong and wrong[0].check in _ALONE:
        return wrong[0].trouble
    full = [each for each in wrong if each.check != "log"] or wrong
    return "; ".join(each.trouble for each in full)


CUTS, EVENTS = 20, 30


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
    """A model and its trainer. Of its `ranks` some are `connected`, and some have `finished`, with a goodbye.
    `published_rows` and `published_bytes` are of cuts since the service started;
    `bytes` those of its tables' values. `trouble` says what keeps cuts from being sealed; empty if nothing does.
    Of a model that no process has, or that is still recovering here, `trouble` says so, and what is not known is
    null.
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
class WrongReplica:
    """A replica of which somebody should know, and why."""

    replica: str
    reason: str


@dataclass(frozen=True)
class ConsumerOverview:
    """A consumer, in the list of all: its lag, and how many replicas it has. `policy` is in words. `wrong` are the
    replicas of which somebody should know. Until this process has the model, what is not known of it is null.
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


@dataclass(frozen=True)
class Overview:
    """A process at one moment; `unix_ms` is when that was, milliseconds since 1970. `missing` names the other
    processes of the service that are alive: each has an overview of its own.
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


def consumer_overviews(service: Service, lags: Iterable[ConsumerLag]) -> list[ConsumerOverview]:
    """The consumers of this process, by name, also of models that are still recovering. In the event loop."""
    lines = {each.consumer: _consumer(service, each) for each in lags}
    for model in service.recovering:
        failed = service.waits_for(model) or service.reloading.reason(model)
        state: State = "failed" if failed else "waiting"
        for each in service.registry.of_model(model):
            lines.setdefault(each.name, _waiting(each.name, model, state, _still_recovering(service, model)))
    for name, model in _coming_consumers(service):
        lines.setdefault(name, _waiting(name, model, "waiting", "this process is about to take it over"))
    return [lines[name] for name in sorted(lines)]


def _still_recovering(service: Service, model: str) -> str:
    if reason := service.reloading.reason(model):
        return f"being reloaded: {reason}"
    why = service.waits_for(model)
    return f"still recovering: {why}" if why else "still recovering"


def _coming_consumers(service: Service) -> Iterator[tuple[str, str]]:
    """Consumers of models that this process owns and whose logs it has not read yet: name and model."""
    owners, here = service.owners, service.registry.consumers
    for model in owners.models():
        owner = owners.owner_of(model)
        if owner and owner.process == owners.me.name:
            yield from ((name, model) for name in owners.consumers_of(model) if name not in here)


def _consumer(service: Service, lag: ConsumerLag) -> ConsumerOverview:
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
        reason=f"nobody answers for model {model!r}: {why}",
        head=None,
        offset=None,
        versions=None,
        rows=None,
        bytes=None,
        seconds=None,
        unsent_norm=None,
        unsent_share=None,
        replicas=0,
        connected=0,
        wrong=[],
        released_rows=0,
        released_bytes=0,
        freshness=freshness_of(DeliveryDurations()),
        policy="",
    )


def freshness_of(durations: DeliveryDurations) -> Freshness:
    """How fresh what a consumer's replicas were given was."""
    p50, p99 = (None if (found := durations.within(share)) is None else round(found, 4) for share in (0.5, 0.99))
    return Freshness(list(durations.freshness.read()[0]), len(durations.recent), p50, p99)


def model_overviews(service: Service) -> list[ModelOverview]:
    """The models of this process, by name: also those that are still recovering, and those that no process has.

    In the event loop.
    """
    lost = dict.fromkeys(unowned_models(service), "no process that is known to be alive has this model")
    without = lost | {name: _still_recovering(service, name) for name in service.recovering}
    lines = {
        name: ModelOverview(name, None, None, None, "", 0, 0, 0, None, None, 0, 0, why)
        for name, why in without.items()
    }
    lines |= {name: _model(service, name) for name in service.models}
    return [lines[name] for name in sorted(lines)]


def unowned_models(service: Service) -> list[str]:
    """The models that no process has, as far as this one knows. In the event loop."""
    owners = service.owners
    return [each for each in owners.models() if each not in service.models and owners.owner_of(each) is None]


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
        finished=sum(each.finished for each in coordinator.sessions.values()),
        tables=len(model.tables),
        bytes=sum(table.spec.nbytes for table in model.tables),
        published_rows=sealer.rows,
        published_bytes=sealer.bytes,
        trouble=model.failure or sealer.quarantine or refused,
    )


def troubles(service: Service) -> list[str]:
    """What a process lacks, although it may be ready. In the event loop."""
    risks = [f"accepted: {each}" for each in service.logs.accepted_risks]
    return [*service.shortcomings, *risks, *service.checkpoints.troubles]


def process_overview(
    service: Service, volumes: list[VolumeOverview], of_access: Iterable[str] = ()
) -> ProcessOverview:
    """This process; `of_access` is what is wrong with who may do what. In the event loop."""
    found, me = checks(service), service.owners.me
    return ProcessOverview(
        process=me.name,
        grpc=me.grpc,
        started=utc(service.started_unix_ns),
        ready=all(each.ok for each in found),
        checks=found,
        troubles=[*of_access, *troubles(service)],
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
