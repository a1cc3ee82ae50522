"""Having a replica read again all rows that it holds."""

from deltasync.consumers.consumer import Consumer, Replica
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.consumers.verification import Verified
from deltasync.core.errors import Contradiction, NotFound, ServiceUnavailable
from deltasync.core.events import EventKind
from deltasync.core.progress import Progress
from deltasync.core.signals import first_of
from deltasync.core.verified import VerifiedStatus
from deltasync.service.service import Service

# So often it is seen whether the replica is still there.
_LOOK_SECONDS = 1.0


async def verify_replica(service: Service, consumer: str, replica: str, by: str) -> Verified:
    """Have a replica read all its rows again, and compare what it finds with what it was sent.

    Raises:
        NotFound: there is no such consumer, or no such replica of it.
        Contradiction: it is away, or holds nothing yet.
        ServiceUnavailable: it has gone meanwhile, or the service ends.
    """
    found = await _answer(service, _connected(service.registry, consumer, replica), consumer)
    service.events.emit(EventKind.REPLICA_VERIFIED, _in_words(found), consumer=consumer, replica=replica, by=by)
    return found


def _connected(registry: ConsumerRegistry, consumer: str, name: str) -> Replica:
    replica = registry.get(consumer).replicas.get(name)
    if replica is None:
        raise NotFound(f"consumer {consumer!r} has no replica {name!r}")
    if replica.stream is None:
        raise Contradiction(f"replica {name!r} of consumer {consumer!r} is away: it can show nothing")
    if not replica.applied.number:
        raise Contradiction(f"replica {name!r} of consumer {consumer!r} holds nothing yet")
    return replica


async def _answer(service: Service, replica: Replica, consumer: str) -> Verified:
    verification = replica.verification
    number, what = verification.ask(), f"replica {replica.name!r}: reading its rows again"
    progress: Progress | None = None
    while (found := verification.answer_to(number)) is None:
        read, rows = verification.rows
        if rows:
            progress = progress or Progress(what, rows)
            progress.at(read)
        await first_of(verification.signal.changed(), service.draining.wait(), seconds=_LOOK_SECONDS)
        if service.draining.is_set():
            raise ServiceUnavailable("the service is shutting down; ask again")
        _check_there(service.registry.get(consumer), replica)
    return found


def _check_there(consumer: Consumer, replica: Replica) -> None:
    if consumer.replicas.get(replica.name) is not replica or replica.stream is None:
        raise ServiceUnavailable(f"replica {replica.name!r} has gone before it had read all its rows; ask again")


def _in_words(found: Verified) -> str:
    others = [each for each in found.tables if each.status is not VerifiedStatus.EQUAL]
    if not others:
        return f"all rows of {len(found.tables)} tables were read again: they are as they were sent"
    return "; ".join(f"table {each.table}: {each.reason}" for each in others)
