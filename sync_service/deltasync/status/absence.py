"""Models of which this process knows, and for which nobody answers now."""

from dataclasses import dataclass

from deltasync.service.service import Service
from deltasync.status.lag import State


@dataclass(frozen=True)
class Absence:
    """That nobody answers for a model: why, and the state in which that leaves its consumers."""

    state: State
    why: str


_LOST = Absence("failed", "no process that is known to be alive has this model")


def absences(service: Service) -> dict[str, Absence]:
    """The models for which nobody answers, by name: they are still recovering here, or no process has them.

    In the event loop.
    """
    owners, trouble = service.owners, service.volumes.trouble
    here = Absence("failed" if trouble else "waiting", f"still recovering{trouble and f': {trouble}'}")
    lost = (each for each in owners.models() if each not in service.models and owners.owner_of(each) is None)
    return dict.fromkeys(lost, _LOST) | dict.fromkeys(service.recovering, here)


def consumers_of(service: Service, model: str) -> list[str]:
    """The names of a model's consumers, as far as they are known here."""
    here = {each.name for each in service.registry.of_model(model)}
    return sorted(here.union(service.owners.consumers_of(model)))
