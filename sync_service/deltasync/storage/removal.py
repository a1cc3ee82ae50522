"""Removing all that is kept of a model: noted first, so that it is removed whole, whenever the service ends."""

import contextlib
from concurrent.futures import Future
from pathlib import Path

from deltasync.storage.log_store import LAST_NUMBER, LogStore
from deltasync.storage.made_files import remove_made
from deltasync.storage.model_records import recorded_models
from deltasync.storage.records import reading
from deltasync.storage.volume import VolumeFailed

_NOTE = "removed/"
_STREAMS = ("cuts", "seals", "layouts")


def note_removal(log: LogStore, model: str) -> Future[None]:
    """Write down that a model is to be removed: once this is done, it will be."""
    return log.put(f"{_NOTE}{model}", b"{}")


def remove_model(log: LogStore, model: str, directory: Path) -> None:
    """Remove what there is of a model whose removal is noted: its records, its streams, its folder. Blocks.

    Raises:
        StorageFailed: the log could not be written; the rest is removed at the next start.
    """
    log.put(f"model/{model}", None).result()
    log.put(f"quarantine/{model}", None).result()
    for deletes in (f"delete/{model}/", f"deleted/{model}/"):
        for name in log.items(deletes):
            log.put(f"{deletes}{name}", None).result()
    for kind in _STREAMS:
        log.truncate(f"{kind}/{model}", LAST_NUMBER).result()
    remove_made(directory, directory.parent)
    log.put(f"{_NOTE}{model}", None).result()


def finish_removal(log: LogStore, model: str, directory: Path) -> None:
    """Remove a model whose removal is noted, and was not finished, if it is. Before another of its name is made:
    that would be taken for it at the next start. Blocks.

    Raises:
        StorageFailed: the log could not be written.
    """
    if "" in log.items(f"{_NOTE}{model}"):
        remove_model(log, model, directory)


def remove_unpublished(log: LogStore, directory: Path) -> list[str]:
    """Remove what is left of models of which no version was ever sealed: their names. Before any model is read.

    Of a first cut that was under way when its process ended the log has rows, and perhaps there are tables that
    had just been made for it. Blocks.

    Args:
        log: the log.
        directory: of all models.

    Raises:
        StorageFailed: a record is damaged, or the log could not be written, but for what a volume refuses: that
            is left until the next start, and does no harm.
    """
    streams = [stream.partition("/") for stream in log.streams()]
    sealed = {model for kind, _, model in streams if kind == "seals"}
    known = dict[str, int]()
    for name, record in recorded_models(log).items():
        with reading(f"record model/{name}"):
            known[name] = record["flushed"]
    begun = {model for kind, _, model in streams if kind in _STREAMS} | known.keys()
    names = sorted(model for model in begun - sealed if not known.get(model))
    for model in names:
        with contextlib.suppress(VolumeFailed):
            remove_model(log, model, directory / model)
    return names


def finish_removals(log: LogStore, models: Path) -> list[str]:
    """Remove the models whose removal is noted, and was not finished: their names. Before any model is read.

    Blocks. What a volume refuses, as the log tells, is left until the next start, or until one is made anew.

    Raises:
        StorageFailed: the log could not be written, for another reason.
    """
    names = list(log.items(_NOTE))
    for model in names:
        with contextlib.suppress(VolumeFailed):
            remove_model(log, model, models / model)
    return names
