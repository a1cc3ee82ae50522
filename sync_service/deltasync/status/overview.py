"""The status of processes, models, ranks, tables, consumers and kept versions, from the parts of the service."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from heapq import nlargest

from deltasync.access.rights import Access
from deltasync.base.clock import steady_ns
from deltasync.base.errors import Owner
from deltasync.base.logs import under_way
from deltasync.base.words import utc
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.cluster.bucket import Member
from deltasync.cluster.owners import Owners
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.cut_times import CutTimes
from deltasync.core.seal import event_time_of
from deltasync.cuts.coordinator import CutCoordinator, CutRefusal
from deltasync.log.volume import Volume
from deltasync.model.feed import nothing_published
from deltasync.model.model import Model
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.kept_versions import Versions
from deltasync.service.models import Models
from deltasync.status.lag import report
from deltasync.status.process import Sources, checks, troubles
from deltasync.status.records import (
    CheckpointStatus,
    ConsumerStatus,
    Delivery,
    KeptStatus,
    ModelStatus,
    ProbeResults,
    ProcessStatus,
    RankStatus,
    RefusalStatus,
    StageSeconds,
    State,
    TableStatus,
    VersionStatus,
    VolumeStatus,
)


def volume_statuses(volumes: Sequence[Volume]) -> list[VolumeStatus]:
    """The volumes that this process writes to. Asks the operating system; any thread."""
    return [
        VolumeStatus(
            volume=each.name,
            free_bytes=each.free_bytes,
            failed=bool(each.trouble),
            refused=each.refusal.in_words if each.refusal else each.trouble,
        )
        for each in volumes
    ]


def process_statuses(owners: Owners, models: Collection[str]) -> list[ProcessStatus]:
    """The processes of the service as this one, which serves `models`, sees them. Running ones come first."""
    # Leases expire while this runs, so each model and each process is looked up once and listed once.
    owner_of = _owners_of(owners, models)
    alive = owners.processes()
    gone = [each for each in owners.gone() if each not in alive]
    return [_process(each, owners, owner_of, alive=each in alive) for each in (*alive, *gone)]


def _owners_of(owners: Owners, models: Collection[str]) -> dict[str, Owner | None]:
    """The owner of each model, except those that this process still serves and nobody owns."""
    named = {name: owners.owner_of(name) for name in sorted({*owners.models(), *models})}
    return {name: owner for name, owner in named.items() if owner or name not in models}


def _process(
    member: Member, owners: Owners, owner_of: Mapping[str, Owner | None], *, alive: bool
) -> ProcessStatus:
    here = member.name == owners.me.name
    return ProcessStatus(
        process=member.name,
        grpc=member.grpc,
        http=member.http,
        here=here,
        alive=alive,
        draining=member.draining,
        confirmed=owners.confirmed,
        models=[name for name, owner in owner_of.items() if owner and owner.process == member.name],
        unowned=[name for name, owner in owner_of.items() if owner is None] if here else [],
        started_unix_ns=member.started,
    )


def this_process(sources: Sources, volumes: list[VolumeStatus], access: Access | None) -> ProcessStatus:
    """All about this process. In the event loop."""
    every, models, probe = checks(sources), sources.models, sources.process.probe
    owners, started = models.owners, sources.process.started_unix_ns
    return replace(
        _process(owners.me, owners, _owners_of(owners, models), alive=owners.me in owners.processes()),
        started_unix_ns=started,
        started=utc(started),
        ready=all(each.ok for each in every),
        checks=every,
        troubles=[*(access.troubles if access else ()), *troubles(sources)],
        work=under_way(),
        probe=ProbeResults(*(getattr(probe, each.name) for each in fields(ProbeResults))) if probe else None,
        volumes=volumes,
    )


def other_processes(owners: Owners) -> list[str]:
    """The names of the other processes that are alive. In the event loop."""
    return sorted(each.name for each in owners.processes() if each.name != owners.me.name)


def model_statuses(
    models: Models, checkpoints: Checkpoints | None = None, versions: Versions | None = None
) -> list[ModelStatus]:
    """The models of this process, by name, with those that are recovering and those that no process owns.

    In the event loop.
    """
    kept = versions.listed() if versions else {}
    lines = {
        name: ModelStatus(model=name, trouble="no live process owns this model") for name in unowned_models(models)
    }
    for name in {*models.recovering, *models.reloading} - models.keys():
        failed = name in models.reloading
        lines[name] = ModelStatus(model=name, failed=failed, trouble=_still_recovering(models, name))
    for name, model in models.items():
        line = _model(model, models.coordinators.get(name))
        trouble = checkpoints.trouble(name) if checkpoints else ""
        remote = models.storage.remote is not None
        lines[name] = replace(
            line,
            kept_versions=len(kept[name]) if name in kept else None,
            checkpoint=_checkpoint(model, trouble, remote=remote),
        )
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


def _model(model: Model, coordinator: CutCoordinator | None) -> ModelStatus:
    newest = model.seals.newest
    event_time = event_time_of(model.seals.newest_version, model.seals)
    line = ModelStatus(
        model=model.name,
        head=model.seals.newest_version,
        step=newest.step if newest else 0,
        seconds_since_cut=model.seals.succession.seconds_since(newest.version, steady_ns()) if newest else None,
        head_event_time_seconds=None if event_time is None else event_time / 1e9,
        tables=len(model.tables),
        bytes=sum(table.spec.nbytes for table in model.tables),
        failed=bool(model.failure or model.tables.failed),
        trouble=model.failure,
    )
    if coordinator is None:
        return line
    ranks, refusal = rank_statuses({model.name: coordinator}), coordinator.refusal
    connected = sum(each.connected and not each.finished for each in ranks)
    finished = sum(each.finished for each in ranks)
    refused = RefusalStatus(round((steady_ns() - refusal.at_ns) / 1e9, 3), refusal.reason) if refusal else None
    quarantine = coordinator.quarantine
    return replace(
        line,
        run=coordinator.run_id,
        ranks=coordinator.run.world_size if coordinator.run else 0,
        connected=connected,
        finished=finished,
        away=len(ranks) - connected - finished,
        published_rows=coordinator.rows,
        published_bytes=coordinator.bytes,
        refused=refused,
        quarantine=quarantine,
        trouble=line.trouble or quarantine or (refused.reason if refused else ""),
    )


def refusal_of(models: Models, name: str) -> CutRefusal | None:
    """The refusal of a model's last cut; None if it was not refused."""
    coordinator = models.coordinators.get(name)
    return coordinator.refusal if coordinator else None


def _checkpoint(model: Model, reason: str, *, remote: bool) -> CheckpointStatus:
    newest, head = model.checkpointed, model.seals.newest_version
    version = newest.version if newest else 0
    return CheckpointStatus(
        version=version,
        behind_versions=max(0, head - version),
        age_seconds=round(max(0, time.time_ns() - newest.made_unix_ns) / 1e9, 3) if newest else None,
        bytes=newest.bytes if newest else 0,
        new_bytes=newest.new_bytes if newest else 0,
        copied_version=model.checkpoints.copied_version if remote else None,
        log_bytes=model.bytes_since_checkpoint,
        reason=reason,
    )


def rank_statuses(coordinators: Mapping[str, CutCoordinator]) -> list[RankStatus]:
    """The ranks of all models, including those that left since the service started. In the event loop."""
    now = steady_ns()
    return [
        RankStatus(
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
        for name, coordinator in sorted(coordinators.items())
        for rank, each in sorted(coordinator.sessions.items())
    ]


def table_statuses(models: Models, model: str) -> list[TableStatus]:
    """The tables of a model of this process. In the event loop."""
    coordinator, refusal, head = models.coordinators.get(model), refusal_of(models, model), models[model].seals
    reasons = [refusal.reason if refusal else "", coordinator.quarantine if coordinator else ""]
    return [
        TableStatus(
            model=model,
            table=each.name,
            kind=each.kind.value,
            rows=each.rows,
            dim=each.dim,
            dtype=str(each.dtype),
            bytes=each.nbytes,
            head=head.newest_version,
            ranks_differ=bool(coordinator and each.name in coordinator.differing),
            refused=next((reason for reason in reasons if repr(each.name) in reason), ""),
        )
        for each in (table.spec for table in models[model].tables)
    ]


def consumer_statuses(
    models: Models, registry: ConsumerRegistry, known: Iterable[ConsumerStatus]
) -> list[ConsumerStatus]:
    """The consumers of this process, by name, with those of recovering models. In the event loop."""
    lines = {each.consumer: each.in_list() for each in known}
    for model in models.recovering:
        failed = models.waits_for(model) or models.reload_reason(model)
        state: State = "failed" if failed else "waiting"
        for each in registry.of_model(model):
            lines.setdefault(each.name, _waiting(models, each, state, _still_recovering(models, model)))
    for name, model in _coming_consumers(models.owners, registry):
        coming = Consumer(name, model, 0)
        lines.setdefault(name, _waiting(models, coming, "waiting", "this process is taking it over"))
    return [lines[name] for name in sorted(lines)]


def _coming_consumers(owners: Owners, registry: ConsumerRegistry) -> Iterator[tuple[str, str]]:
    """Name and model of each consumer whose model this process owns and has not loaded yet."""
    for model in owners.models():
        owner = owners.owner_of(model)
        if owner and owner.process == owners.me.name:
            yield from ((name, model) for name in owners.consumers_of(model) if name not in registry.consumers)


def _waiting(models: Models, consumer: Consumer, state: State, why: str) -> ConsumerStatus:
    """A consumer whose model is not loaded: neither its head nor its lag is known."""
    known = report(consumer, nothing_published(consumer.model, models), time.time_ns()).in_list()
    reason = f"model {consumer.model!r} is not available: {why}"
    known = replace(known, state=state, failed=state == "failed", reason=reason, replicas=[])
    return replace(known, head=None, head_step=None, offset=None, lag=None, fleet=None, connected=None, away=None)


def kept_status(kept: KeptVersion, followers: Mapping[str, list[str]], own_bytes: int | None = None) -> KeptStatus:
    """A kept version; `followers` are consumers by the id of the version that they follow."""
    return KeptStatus(
        model=kept.model,
        version=kept.version,
        name=kept.name,
        step=kept.seal.step,
        sealed_unix_ns=kept.seal.sealed_unix_ns,
        event_time_unix_ns=kept.seal.event_time_unix_ns,
        kept_unix_ns=kept.kept_unix_ns,
        bytes=kept.bytes,
        own_bytes=own_bytes,
        by=kept.by,
        followers=followers.get(kept.id, []),
    )


def kept_statuses(versions: Versions, count: int) -> list[KeptStatus]:
    """At most `count` kept versions of this process's models, newest first, as far as they have been read.

    Versions that a consumer follows come before others, then those with a name. In the event loop.
    """
    lines = list[KeptStatus]()
    for model, kept in versions.listed().items():
        followers = versions.followers_of(model)
        lines += [kept_status(each, followers) for each in kept]
    chosen = sorted(lines, key=lambda line: (not line.followers, not line.name, -line.sealed_unix_ns))[:count]
    return sorted(chosen, key=lambda line: -line.sealed_unix_ns)


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
