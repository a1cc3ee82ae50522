"""The description of a model's version in the metadata of a file that `deltasync export` wrote."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltasync.base.errors import InvalidInput
from deltasync.core.position import Position
from deltasync.core.table_form import spec_of_record, spec_record
from deltasync.core.tables import TableSpec

# The key of the description, which is JSON, because metadata of safetensors are texts.
_KEY = "deltasync"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ExportMetadata:
    """A version of a model in a file. The file has one tensor for each table, under the table's name.

    Parameters and buffers have their shape in the trainer's model if it is known, all other tables [rows, dim].

    Attributes:
        position: the version.
        event_time_unix_ns: the time of the newest event on which it was trained; None if unknown.
    """

    model: str
    position: Position
    step: int
    event_time_unix_ns: int | None
    tables: Sequence[TableSpec]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the file."""
        tables = [spec_record(each) for each in self.tables]
        return {_KEY: json.dumps({"format": _FORMAT, **asdict(self), "tables": tables})}

    @classmethod
    def of_metadata(cls, path: str, metadata: Mapping[str, str] | None) -> "ExportMetadata":
        """Read the metadata of the file at `path`."""
        if _KEY not in (metadata or {}):
            raise InvalidInput(f"{path} is not an export: write one with `deltasync export`")
        record: dict[str, Any] = json.loads((metadata or {})[_KEY])
        if (found := record.pop("format")) != _FORMAT:
            raise InvalidInput(f"{path} has format {found}, this version reads {_FORMAT}: update deltasync")
        tables = [spec_of_record(each) for each in record["tables"]]
        return cls(**{**record, "position": Position(**record["position"]), "tables": tables})
