"""A model's files made anew of a log that has all of its cuts: those that there were are another process's."""

from pathlib import Path
from typing import Any

from deltasync.core.table_records import spec_of_record
from deltasync.storage.log_store import LogStore
from deltasync.storage.model_store import ModelStore
from deltasync.storage.records import pack_json, reading, unpack_json


def make_anew(log: LogStore, model: str, directory: Path) -> None:
    """Give a model of which a log has every cut tables in a folder, all zero, into which they are to be read: from
    here on that is where the log says that they are. Of a model that is not written down nothing is made. Blocks.

    Raises:
        StorageFailed: there is no room for them, or the log could not be written.
    """
    found = log.items(f"model/{model}").get("")
    if found is None:
        return
    with reading(f"record model/{model}"):
        record = unpack_json(found)
        specs = [spec_of_record(each) for each in record["tables"]]
        store = ModelStore(log, model, directory)
        store.recover({"history": record["history"], "flushed": 0, "tables": []})
        store.change(specs, {})
        made = unpack_json(log.items(f"model/{model}")[""])
        log.put(f"model/{model}", pack_json(_with_past(made, record))).result()


def _with_past(made: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """A record of tables that were made, with what the one before says of their past."""
    grown = {each["name"]: each["grown_from"] for each in record["tables"] if "grown_from" in each}
    tables = [
        each | ({"grown_from": grown[each["name"]]} if each["name"] in grown else {}) for each in made["tables"]
    ]
    return made | {"tables": tables} | ({"removed": record["removed"]} if "removed" in record else {})
