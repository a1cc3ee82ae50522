"""Models of which this process knows, and for which nobody answers now."""

from collections.abc import Iterator
from dataclasses import dataclass

from deltasync.service.service import Service
from deltasync.status.lag import State


@dataclass(frozen=True)
class Absence:
    """That nobody answers for a model: why, and the state in which that leaves its consumers."""

    state: State
    why: str


_COMING = Absence("waiting", "this process is about to take it over")
_LOST = Absence("failed", "no process that is known to be alive has this model")


def absences(service: Service) -> dict[str, Absence]:
    """The models for which nobody answers, by name: they are still recovering here, or no process has them.

    In the event loop.
    """
    owners, trouble = service.owners, service.volumes.trouble
    here = Absence("failed" if trouble else "waiting", f"still recovering{trouble and f': {trouble}'}")
    lost = (each for each in owners.models() if each not in service.models and owners.owner_of(each) is None)
    return dict.fromkeys(lost, _LOST) | dict.fromkeys(service.recovering, here)


def absent_consumers(service: Service) -> Iterator[tuple[str, str, Absence]]:
    """Consumers of models for which nobody answers: name, model and absence. In the event loop."""
    for model, absence in absences(service).items():
        here = {each.name for each in service.registry.of_model(model)}
        for name in here.union(service.owners.consumers_of(model)):
            yield name, model, absence
    for model in service.owners.models():
        owner = service.owners.owner_of(model)
        if owner and owner.process == service.owners.me.name:
            for name in set(service.owners.consumers_of(model)) - service.registry.consumers.keys():
                yield name, model, _COMING
