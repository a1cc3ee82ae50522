"""Whether what a log says of a model's past hangs together: no engine's word is taken for it."""

from deltasync.core.errors import StorageFailed
from deltasync.core.seal import Seal
from deltasync.storage.layouts import Layouts
from deltasync.storage.log_store import LogStore, LogUnavailable, Record
from deltasync.storage.records import name_of, reading, seal_of_record, unpack_json, unpack_rows


def sound_upto(log: LogStore, model: str) -> tuple[int, str]:
    """Up to which version the seals follow each other, and what is wrong with the next one; empty if nothing is.

    Blocks.

    Raises:
        LogUnavailable: it does not answer.
    """
    before: Seal | None = None
    try:
        for record in log.read(f"seals/{model}"):
            with reading(name_of(f"seals/{model}", record.number)):
                seal = seal_of_record(unpack_json(record.payload))
            if before and not follows(before, seal):
                return (
                    before.version,
                    f"the seal of version {seal.version} does not follow that of {before.version}",
                )
            before = seal
    except LogUnavailable:
        raise
    except StorageFailed as error:
        return before.version if before else 0, str(error)
    return before.version if before else 0, ""


def follows(before: Seal, seal: Seal) -> bool:
    """Whether a seal comes right after another one, as its checksum says."""
    return seal.version == before.version + 1 and seal.after(before).checksum == seal.checksum


def rows_upto(log: LogStore, model: str, first: int, last: int) -> tuple[int, str]:
    """Up to which version after `first`, and until `last`, all rows are there, and what is wrong with the next.

    Every row is read. Blocks.

    Raises:
        LogUnavailable: it does not answer.
    """
    layouts = Layouts(log, model)
    layouts.recover()
    for record in log.read(f"seals/{model}", first + 1, last):
        seal = seal_of_record(unpack_json(record.payload))
        try:
            rows = sum(len(unpack_rows(each.payload, layouts.shards)) for each in _parts(log, model, seal))
        except LogUnavailable:
            raise
        except (StorageFailed, LookupError, ValueError) as error:
            return seal.version - 1, str(error)
        if rows != seal.rows:
            return seal.version - 1, f"it has {rows} rows of version {seal.version}, expected {seal.rows}"
    return last, ""


def _parts(log: LogStore, model: str, seal: Seal) -> list[Record]:
    return [each for each in log.read(f"cuts/{model}", seal.version, seal.version) if each.part < seal.world_size]


def go_back(log: LogStore, model: str, version: int) -> None:
    """Have a log that has nothing after a version: what is missing comes from the trainers. Blocks.

    Raises:
        StorageFailed: the log could not be written.
    """
    for stream in (f"seals/{model}", f"cuts/{model}"):
        log.drop(stream, version + 1).result()
