"""The small records of a log that checkpoints and backups take along, for a start elsewhere."""

from collections.abc import Collection

from deltasync.storage.log_store import LogStore
from deltasync.storage.records import reading, unpack_json
from deltasync.views.records import view_name


def records_of_consumers(log: LogStore, model: str) -> dict[str, bytes]:
    """The records of a model's consumers, of their views and of the offsets of their replicas."""
    names = [name for name, of_model in models_of_consumers(log).items() if of_model == model]
    found = {each: log.items(each).get("") for name in names for each in (f"consumer/{name}", view_name(name))}
    offsets = {
        each + rest: value
        for each in (f"offset/{name}/" for name in names)
        for rest, value in log.items(each).items()
    }
    return {name: value for name, value in found.items() if value is not None} | offsets


def records_of_model(log: LogStore, model: str) -> dict[str, bytes]:
    """The records of a model, and of the deletes that were asked of it and done."""
    found = {each: log.items(each).get("") for each in (f"model/{model}", f"quarantine/{model}")}
    deletes = {
        each + rest: value
        for each in (f"delete/{model}/", f"deleted/{model}/")
        for rest, value in log.items(each).items()
    }
    return {name: value for name, value in found.items() if value is not None} | deletes


def records_of_others(log: LogStore, models: Collection[str]) -> dict[str, bytes]:
    """The records of consumers whose model is none of these."""
    names = (f"consumer/{name}" for name, model in models_of_consumers(log).items() if model not in models)
    return {name: log.items(name)[""] for name in names}


def models_of_consumers(log: LogStore) -> dict[str, str]:
    """The model of each consumer that is written down, by the consumer's name.

    Raises:
        StorageFailed: a record is damaged.
    """
    found = {}
    for name, record in log.items("consumer/").items():
        with reading(f"record consumer/{name}"):
            found[name] = str(unpack_json(record)["model"])
    return found
