"""How a model comes back: at the start, and when its rows do not fit their digests."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from deltasync.base.backoff import backoff
from deltasync.base.errors import ServiceUnavailable
from deltasync.base.events import EventKind
from deltasync.base.signals import first_of
from deltasync.checkpoints.place import PlaceFailed
from deltasync.core.table_memory import NoTableMemory
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model, RowsLost
from deltasync.model.model_store import (
    StoreOf,
    finish_removals,
    recorded_models,
    remove_records,
    remove_unpublished,
)

if TYPE_CHECKING:
    from deltasync.service.service import Service


def models_to_recover(log: LogStore, checkpoints_of: StoreOf) -> dict[str, Mapping[str, Any]]:
    """What a log says of each model that was published, by name, once what is left of others is removed. Blocks.

    Raises:
        StorageFailed: a record is damaged, or the log could not be written.
    """
    removed = finish_removals(log, checkpoints_of) + remove_unpublished(log, checkpoints_of)
    return {name: record for name, record in recorded_models(log).items() if name not in removed}


async def recover_model(service: "Service", name: str, record: Mapping[str, Any], *, patient: bool) -> None:
    """Have a model of which this is written down: if `patient`, again and again while a volume refuses what that
    needs, there is no memory for its tables, or its checkpoints or the log cannot be reached; meanwhile
    `recovery_failures` of the service says why. Ends without it where the service ends. A process among others
    waits for volumes alone: another one may have the rest.

    Raises:
        StorageFailed: a file is damaged or missing; or something passing, where that is not waited for.
    """
    passing = (VolumeFailed,) if service.hosting else (VolumeFailed, PlaceFailed, LogUnavailable, NoTableMemory)
    started, model = time.monotonic(), None
    try:
        for pause in backoff():
            try:
                model = model or await _recovered(service, name, record)
                await service.have(model)
            except RowsLost as error:
                service.events.emit(EventKind.FAILED, "its trainer has to send every row", error, model=name)
                await asyncio.to_thread(remove_records, service.logs.of(name), name)
                service.recovering.pop(name, None)
                return
            except passing as error:
                if not patient:
                    raise
                text = "it waits until what has failed comes back"
                service.events.emit(EventKind.FAILED, text, error, model=name)
                # What a volume refuses, `volumes` says, with its path and until it takes it.
                service.recovery_failures[name] = "" if isinstance(error, VolumeFailed) else str(error)
            else:
                took = f"in {time.monotonic() - started:.2f} s"
                version = model.seals.newest_version
                service.events.emit(EventKind.MODEL_RECOVERED, took, model=name, version=version)
                return
            await first_of(service.draining.wait(), seconds=pause)
            if service.draining.is_set():
                return
    finally:
        service.recovery_failures.pop(name, None)
        if model and service.models.get(name) is not model:
            await service.views.give_up(model)
            await model.stop()


async def _recovered(service: "Service", name: str, record: Mapping[str, Any]) -> Model:
    model = service.make_model(name)
    try:
        derived = await service.views.derived(model, service.registry.of_model(name))
        await model.recover(record, derived)
    except BaseException:
        await service.views.give_up(model)
        await model.stop()
        raise
    finally:
        for problem in model.problems:
            service.events.emit(EventKind.FAILED, problem, model=name)
    return model


_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Reloading:
    """Reloads the failed models of a service. Used in the event loop.

    Attributes:
        reasons: why each model is away that is being reloaded, and what keeps it from coming back, by name.
    """

    def __init__(self, service: "Service", tasks: asyncio.TaskGroup) -> None:
        self._service = service
        self._tasks = tasks
        self.reasons = dict[str, str]()
        self._reloads = dict[str, asyncio.Task[None]]()

    def reason(self, model: str) -> str:
        """Why a model is being reloaded, or is about to be; empty if it is not."""
        if reason := self.reasons.get(model):
            return "; ".join(filter(None, (reason, self._service.recovery_failures.get(model))))
        found = self._service.models.get(model)
        return found.failed if found else ""

    def check(self, model: str) -> None:
        """Check that a model is not being reloaded.

        Raises:
            ServiceUnavailable: it is; the error has the reason.
        """
        if reason := self.reason(model):
            text = f"model {model!r} is being reloaded from its checkpoint and the log; try again"
            raise ServiceUnavailable(text, detail=f" ({reason})")

    async def watch(self, model: Model) -> None:
        """Reload a model as soon as it fails; ends then, or once the model is not here any more."""
        name = model.name
        while self._service.models.get(name) is model:
            if model.failed:
                self.reasons[name] = model.failed
                self._reloads[name] = self._tasks.create_task(self._reload(model))
                return
            await first_of(model.signal.changed(), seconds=_SECONDS)

    async def give_up(self, model: str) -> None:
        """Stop reloading a model, if it is being reloaded: another process gets it, or the service ends."""
        if reload := self._reloads.get(model):
            reload.cancel()
            await asyncio.wait([reload])
            if self._reloads.get(model) is reload:  # It had not begun, and so could not clean up.
                del self.reasons[model], self._reloads[model]

    async def end(self) -> None:
        """Stop all reloads: the service ends."""
        for name in list(self._reloads):
            await self.give_up(name)

    async def _reload(self, model: Model) -> None:
        service, name, why, started = self._service, model.name, model.failed, time.monotonic()
        service.events.emit(
            EventKind.ROWS_DAMAGED, f"{why}; the model is reloaded from its checkpoint and the log", model=name
        )
        try:
            for pause in backoff(_LONGEST_PAUSE_SECONDS):
                try:
                    await _to_the_end(self._drop(model))
                    await recover_model(service, name, service.recovering[name], patient=True)
                except Exception as error:  # noqa: BLE001  # one model's trouble is its own
                    self.reasons[name] = f"{why}; that has failed, and is tried again: {error}"
                    service.events.emit(EventKind.FAILED, "its reload is tried again", error, model=name)
                else:
                    break
                await first_of(service.draining.wait(), seconds=pause)
                if service.draining.is_set():
                    return
        finally:
            del self.reasons[name], self._reloads[name]
        if reloaded := service.models.get(name):  # Else the service ends.
            text = f"it was away for {time.monotonic() - started:.2f} s: {why}"
            version = reloaded.seals.newest_version
            service.events.emit(EventKind.MODEL_RELOADED, text, model=name, version=version)

    async def _drop(self, model: Model) -> None:
        """Have a model no more until it is recovered. Its consumers, with their offsets, stay.

        Raises:
            StorageFailed: the log cannot be read now.
        """
        service, name = self._service, model.name
        async with service.changing:
            if service.models.get(name) is model:
                service.recovering[name] = await asyncio.to_thread(_recorded, model.log, name)
                reloading = lambda: ServiceUnavailable(f"model {name!r} is being reloaded; try again")  # noqa: E731
                await service.end_model(service.coordinators[name], reloading)
            # Anew each time: a cut that was being sealed may have brought another table.
            service.recovering[name] = await asyncio.to_thread(_recorded, model.log, name)


def _recorded(log: LogStore, name: str) -> Mapping[str, Any]:
    return recorded_models(log)[name]


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Do some work, also where whoever waits for it is cancelled meanwhile."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
