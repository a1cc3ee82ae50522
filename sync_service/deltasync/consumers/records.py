"""Consumers as they are written down."""

from deltasync.consumers.consumer import Consumer
from deltasync.consumers.offsets import recorded_offsets
from deltasync.consumers.pause import pause_of_record
from deltasync.core.policy import Policy
from deltasync.storage.log_store import LogStore
from deltasync.storage.records import reading, unpack_json


def recorded_consumers(log: LogStore) -> dict[str, Consumer]:
    """The consumers that a log has, with the offsets of their replicas. Blocks.

    Raises:
        StorageFailed: a record is damaged.
    """
    return {name: _recorded_consumer(log, name, record) for name, record in log.items("consumer/").items()}


def _recorded_consumer(log: LogStore, name: str, record: bytes) -> Consumer:
    replicas = recorded_offsets(log, name)
    with reading(f"record consumer/{name}"):
        found = unpack_json(record)
        policy = Policy.from_dict(found["policy"])
        pause = pause_of_record(found)
        return Consumer(name, found["model"], found["created_unix_ns"], policy, replicas, pause=pause)
