"""What a read of the tracker returns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deltasync.core.errors import InvalidInput
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.ranking import check_ranked


@dataclass(frozen=True, eq=False)
class DeltaRows:
    """The changed rows of one table that this rank holds, in host memory. Not to be written to.

    Attributes:
        ids: int64 [n], global row ids, ascending, each once.
        columns: offset and number of the columns held, by shard; most ranks hold all columns in one.
        values: current rows [n, columns held], or momentum: as many columns, or one for each shard where the
            optimizer keeps one value per row. None where the mode is ids only.
        first: the same as they were at the consumer's cursor; NaN where it has none, as after a `resync`. None
            where the mode does not keep them.
        mode: how they were read.
    """

    ids: torch.Tensor
    columns: list[tuple[int, int]]
    values: torch.Tensor | None
    first: torch.Tensor | None
    mode: TrackingMode

    @property
    def states(self) -> torch.Tensor | None:
        """The `states` of TorchRec's tracker: first rows, the last momentum, or by how much momentum has grown."""
        if self.values is None or self.first is None:
            return self.values
        return self.first if self.mode is TrackingMode.EMBEDDING else self.values - self.first

    def norms(self) -> torch.Tensor:
        """L2 norm of what has changed in each row, or of the last momentum: float32 [n].

        Raises:
            InvalidInput: the mode, or a read of ids only, has no values to tell it from.
        """
        check_ranked(self.mode)
        if self.values is None:
            raise InvalidInput("this delta has ids only: read it with get_delta")
        changed = self.values.float() if self.first is None else self.values.float() - self.first.float()
        norms: torch.Tensor = torch.linalg.vector_norm(changed, dim=1)
        return norms

    def select(self, rows: torch.Tensor) -> "DeltaRows":
        """Some of the rows, by a bool mask [n]."""
        values, first = (None if all_rows is None else all_rows[rows] for all_rows in (self.values, self.first))
        return DeltaRows(self.ids[rows], self.columns, values, first, self.mode)


@dataclass(frozen=True, eq=False)
class Token:
    """Stands for a delta that was read. It acknowledges that delta for its consumer, and nothing else.

    Attributes:
        consumer: its name.
        cursor: everything marked up to here was in the delta, or is carried over.
        rows: those of the delta, by FQN.
        carried: global ids that were due but left for later, by FQN.
        registration: tells the consumer from another of its name, before or after it.
    """

    consumer: str
    cursor: int
    rows: Mapping[str, DeltaRows]
    carried: Mapping[str, torch.Tensor]
    registration: object


@dataclass(frozen=True, eq=False)
class Delta:
    """What has changed for a consumer since its cursor.

    Attributes:
        rows: changed rows by table FQN; tables without any are left out.
        token: to be given to `Tracker.acknowledge` once the rows have safely arrived.
    """

    rows: Mapping[str, DeltaRows]
    token: Token

    @property
    def ids(self) -> dict[str, torch.Tensor]:
        """Global ids of the changed rows by table FQN."""
        return {fqn: rows.ids for fqn, rows in self.rows.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, first ones too."""
        tensors = [part for rows in self.rows.values() for part in (rows.ids, rows.values, rows.first)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
