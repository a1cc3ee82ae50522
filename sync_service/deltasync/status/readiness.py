"""Whether a service takes streams, check by check."""

from collections.abc import Iterable
from dataclasses import dataclass

from deltasync.core.words import listed
from deltasync.service.service import Service


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
