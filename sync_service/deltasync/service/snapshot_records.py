"""The small records of a model, and of its consumers, as far as snapshots have them."""

from collections.abc import Mapping

from deltasync.storage.log_store import LogStore
from deltasync.storage.records import reading, unpack_json
from deltasync.views.records import release_name, view_name


def records_of_consumers(log: LogStore, model: str) -> dict[str, bytes]:
    """Those of a model's consumers, with the offsets of their replicas."""
    consumers = consumers_of(log, model)
    names = [name for each in consumers for name in (f"consumer/{each}", view_name(each), release_name(each))]
    found = {name: value for name in names if (value := log.items(name).get("")) is not None}
    offsets = (f"offset/{each}/" for each in consumers)
    return found | {prefix + name: value for prefix in offsets for name, value in log.items(prefix).items()}


def consumers_of(log: LogStore, model: str) -> list[str]:
    """The names of the consumers that follow a model."""
    return [name for name, of_model in recorded_consumers(log).items() if of_model == model]


def recorded_consumers(log: LogStore) -> dict[str, str]:
    """The models of all consumers that a log has, by the consumers' names."""
    found = {}
    for name, record in log.items("consumer/").items():
        with reading(f"record consumer/{name}"):
            found[name] = str(unpack_json(record)["model"])
    return found


def records_of_model(log: LogStore, model: str) -> dict[str, bytes]:
    """Those of a model, with the deletes that are asked for and done."""
    found = {name: log.items(name).get("") for name in (f"model/{model}", f"quarantine/{model}")}
    deletes = (f"delete/{model}/", f"deleted/{model}/")
    several = {prefix + name: value for prefix in deletes for name, value in log.items(prefix).items()}
    return several | {name: value for name, value in found.items() if value is not None}


def newest_release(small: Mapping[str, bytes], consumer: str) -> int:
    """The number of a view's newest release; 0 if there is none."""
    if (found := small.get(release_name(consumer))) is None:
        return 0
    with reading(f"record {release_name(consumer)}"):
        number: int = unpack_json(found)["head"]["number"]
        return number
