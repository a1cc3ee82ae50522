"""How a model comes back at the start, also while a volume, a place of checkpoints, the log or memory is away."""

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deltasync.checkpoints.place import PlaceFailed
from deltasync.core.backoff import backoff
from deltasync.core.events import EventKind
from deltasync.core.signals import first_of
from deltasync.core.table_memory import NoTableMemory
from deltasync.feeds.model import Model, RowsLost
from deltasync.storage.log_store import LogStore, LogUnavailable
from deltasync.storage.model_store import recorded_models
from deltasync.storage.removal import StoreOf, finish_removals, remove_records, remove_unpublished
from deltasync.storage.volume import VolumeFailed

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
