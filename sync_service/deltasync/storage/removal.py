"""Removing all that is kept of a model: noted first, so that it is removed whole, whenever the service ends."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future

from deltasync.checkpoints.place import PlaceFailed
from deltasync.checkpoints.store import CheckpointStore
from deltasync.storage.log_store import LAST_NUMBER, LogStore
from deltasync.storage.model_store import recorded_models
from deltasync.storage.volume import VolumeFailed

_NOTE = "removed/"
_STREAMS = ("cuts", "seals", "layouts")
StoreOf = Callable[[str], CheckpointStore]


def note_removal(log: LogStore, model: str) -> Future[None]:
    """Write down that a model is to be removed: once this is done, it will be."""
    return log.put(f"{_NOTE}{model}", b"{}")


def remove_model(log: LogStore, model: str, checkpoints: CheckpointStore) -> None:
    """Remove what there is of a model whose removal is noted: its records, its streams, its checkpoints. Blocks.

    Raises:
        StorageFailed: the log, or a place of checkpoints, could not be written; the rest is removed at the next
            start.
    """
    remove_records(log, model)
    checkpoints.remove_all()
    log.put(f"{_NOTE}{model}", None).result()


def remove_records(log: LogStore, model: str) -> None:
    """Remove all that the log has of a model. Blocks.

    Raises:
        StorageFailed: the log could not be written.
    """
    for name in (f"model/{model}", f"cut/{model}", f"quarantine/{model}"):
        log.put(name, None).result()
    for deletes in (f"delete/{model}/", f"deleted/{model}/"):
        for name in log.items(deletes):
            log.put(f"{deletes}{name}", None).result()
    for kind in _STREAMS:
        log.truncate(f"{kind}/{model}", LAST_NUMBER).result()


def finish_removal(log: LogStore, model: str, checkpoints: CheckpointStore) -> None:
    """Finish the removal of a model, if one was noted and did not finish. Blocks.

    Call it before another model of that name is made, which the next start would remove otherwise.

    Raises:
        StorageFailed: the log, or a place of checkpoints, could not be written.
    """
    if "" in log.items(f"{_NOTE}{model}"):
        remove_model(log, model, checkpoints)


def remove_unpublished(log: LogStore, checkpoints_of: StoreOf) -> list[str]:
    """Remove what is left of models of which no version was ever sealed: their names. Before any model is read.

    Of a first cut that was under way when its process ended the log has rows. A model that has checkpoints was
    published: brokers have lost its seals. Blocks.

    Raises:
        StorageFailed: a record is damaged, or the log could not be written. What a volume refuses is left until
            the next start, and does no harm.
    """
    streams = [stream.partition("/") for stream in log.streams()]
    sealed = {model for kind, _, model in streams if kind == "seals"}
    begun = {model for kind, _, model in streams if kind in _STREAMS} | recorded_models(log).keys()
    names = list[str]()
    for model in sorted(begun - sealed - log.items("cut/").keys()):
        found = checkpoints_of(model).manifests()
        if found.manifests or (log.shared and found.unreachable):
            continue
        names.append(model)
        with contextlib.suppress(VolumeFailed):
            remove_records(log, model)
    return names


def finish_removals(log: LogStore, checkpoints_of: StoreOf) -> list[str]:
    """Remove the models whose removal is noted, and was not finished: their names. Before any model is read.

    Blocks. What a volume or a place of checkpoints refuses is left until the next start, or until one of that name
    is made anew.

    Raises:
        StorageFailed: the log could not be written, for another reason.
    """
    names = list(log.items(_NOTE))
    for model in names:
        with contextlib.suppress(VolumeFailed, PlaceFailed):
            remove_model(log, model, checkpoints_of(model))
    return names
