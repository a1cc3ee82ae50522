"""How a model comes back at the start, also on a volume that takes nothing now."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltasync.core.backoff import backoff
from deltasync.core.events import EventKind
from deltasync.core.signals import first_of
from deltasync.feeds.model import Model
from deltasync.storage.log_store import LogStore
from deltasync.storage.model_records import recorded_models
from deltasync.storage.removal import finish_removals, remove_unpublished
from deltasync.storage.volume import VolumeFailed

if TYPE_CHECKING:
    from deltasync.service.service import Service


def models_to_recover(log: LogStore, models: Path) -> dict[str, Mapping[str, Any]]:
    """What a log says of each model that was published, by name, once what is left of others is removed. Blocks.

    Raises:
        StorageFailed: a record is damaged, or the log could not be written.
    """
    removed = finish_removals(log, models) + remove_unpublished(log, models)
    return {name: record for name, record in recorded_models(log).items() if name not in removed}


async def recover_model(service: "Service", name: str, record: Mapping[str, Any], *, patient: bool) -> None:
    """Have a model of which this is written down: if `patient`, again and again while a volume refuses what that
    needs, as room for a table that had grown. Ends without it where the service ends.

    Raises:
        StorageFailed: a file is damaged or missing; or a volume refuses something.
    """
    started, model = time.monotonic(), None
    for pause in backoff():
        try:
            model = model or await _recovered(service, name, record)
            await service.have(model)
        except VolumeFailed as error:
            if not patient:
                raise
            service.events.emit(EventKind.FAILED, "it waits for its volume to come back", error, model=name)
        else:
            took = f"in {time.monotonic() - started:.2f} s"
            version = model.seals.newest_version
            service.events.emit(EventKind.MODEL_RECOVERED, took, model=name, version=version)
            return
        await first_of(service.draining.wait(), seconds=pause)
        if service.draining.is_set():
            return


async def _recovered(service: "Service", name: str, record: Mapping[str, Any]) -> Model:
    model = Model(name, service.logs.of(name), service.directory(name))
    try:
        await model.recover(record)
    except BaseException:
        await model.stop()
        raise
    return model
