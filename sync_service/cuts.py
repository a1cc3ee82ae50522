"""Parts of a cut, until all ranks have closed theirs."""

from dataclasses import dataclass, field

from sync_service.errors import Contradiction, InvalidInput
from sync_service.tables import Shard, Table


@dataclass
class Part:
    """One rank's share of a cut, as far as it has come."""

    rank: int
    shards: list[Shard]
    records: int = 0
    rows: int = 0
    bytes: int = 0
    step_end_unix_ns: int = 0
    closed: bool = False


@dataclass
class Cut:
    """What the ranks publish after one step: at most one is open in a model."""

    version: int
    step: int
    world_size: int
    must_be_full: bool
    parts: dict[int, Part] = field(default_factory=dict)

    def begin(self, rank: int, shards: list[Shard]) -> Part:
        """Begin a rank's part; one that was begun before is begun anew."""
        part = self.parts[rank] = Part(rank, shards)
        return part

    def close(self, part: Part, *, rows: int, full: bool, step_end_unix_ns: int) -> None:
        """Close a rank's part.

        Raises:
            InvalidInput: the part's count of rows is not what arrived, or not that of a full part.
            Contradiction: the cut must hold every row, and the part does not claim to.
        """
        if rows != part.rows:
            raise InvalidInput(f"rank {part.rank} closed a part of {rows} rows, but {part.rows} arrived")
        shard_rows = sum(shard.rows for shard in part.shards)
        if full and rows != shard_rows:
            raise InvalidInput(
                f"rank {part.rank} closed a full part of {rows} rows, but its shards have {shard_rows}"
            )
        if self.must_be_full and not full:
            raise Contradiction(
                f"rank {part.rank} sent only changed rows, but its run does not continue the published history: "
                "publish every row first"
            )
        part.step_end_unix_ns = step_end_unix_ns
        part.closed = True

    def closed_by(self, rank: int) -> bool:
        """Whether a rank has closed its part."""
        return rank in self.parts and self.parts[rank].closed

    def check_coverage(self, tables: list[Table]) -> None:
        """Check that the shards of a complete, full cut make up whole tables.

        Raises:
            Contradiction: some values of a table belong to no rank's shard.
        """
        shards = {shard for part in self.parts.values() for shard in part.shards}
        for table in tables:
            covered = sum(shard.rows * shard.cols for shard in shards if shard.table == table)
            if covered < table.rows * table.dim:
                raise Contradiction(
                    f"table {table.name!r}: all shards together hold {covered} of {table.rows * table.dim} values"
                )

    @property
    def complete(self) -> bool:
        """Whether every rank has closed its part."""
        return len(self.parts) == self.world_size and all(part.closed for part in self.parts.values())

    @property
    def rows(self) -> int:
        """Rows of all parts together."""
        return sum(part.rows for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """Bytes of ids and values of all parts together."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def step_end_unix_ns(self) -> int:
        """When the step ended on the last of the ranks."""
        return max(part.step_end_unix_ns for part in self.parts.values())
