"""The tables of fbgemm's table-batched embeddings (TBEs) for inference, which hold quantised rows.

Nothing of fbgemm or TorchRec is imported: they are known by what they hold.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from deltasync.core.errors import Contradiction
from deltasync.core.tbe import SCALE_AND_BIAS_BYTES

_PRUNING = ("index_remappings_array", "index_remapping_hash_table")
_WRITABLE = ("HOST", "DEVICE")
# What collections call their tables.
TABLES_OF = ("embedding_bags", "embeddings")


@dataclass(eq=False)
class Tbe:
    """One of a module's TBEs.

    Attributes:
        name: what to call it in a sentence.
        module: fbgemm's module.
    """

    name: str
    module: Any
    _views: list[torch.Tensor] = field(default_factory=list)
    _found: tuple[tuple[int, int], ...] = ()

    def view(self, index: int) -> torch.Tensor:
        """The live memory of table number `index`: uint8 [rows, bytes of a row and what it is padded with].

        Raises:
            Contradiction: there is none, or none that may be written.
        """
        # Found anew where it has moved; not each time, since those of all tables are found together.
        found = tuple((each.data_ptr(), each.numel()) for each in self.memory)
        if found != self._found:
            self._views, self._found = self._views_now(), found
        return self._views[index]

    def check(self) -> None:
        """Check that its rows are those that are looked up, and lie where they can be written.

        Raises:
            Contradiction: they are not, or do not.
        """
        module = self.module
        pruned = [name for name in _PRUNING if getattr(module, name).numel()]
        if pruned or module.index_remapping_hash_table_cpu is not None:
            raise Contradiction(f"{self.name} is pruned: it has only some rows; quantise the model unpruned")
        if hasattr(module, "kv_embedding_cache"):
            raise Contradiction(f"{self.name} keeps rows by key: make the collection without virtual tables")
        if module.scale_bias_size_in_bytes != SCALE_AND_BIAS_BYTES:
            size = module.scale_bias_size_in_bytes
            raise Contradiction(f"{self.name} has {size} bytes of scale and bias in a row, expected 4")

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """What it keeps rows in."""
        return self.module.weights_host, self.module.weights_dev, self.module.weights_uvm

    def _views_now(self) -> list[torch.Tensor]:
        if not self.module.weight_initialized:
            raise Contradiction(f"{self.name} has no memory yet: call its initialize_weights()")
        if any(each.is_meta for each in self.memory):
            raise Contradiction(f"{self.name} is on the meta device, which cannot be written")
        try:
            views = [each[0] for each in self.module.split_embedding_weights_with_scale_bias(0)]
        except RuntimeError:  # It cuts them out of its memory, and shapes what it has cut.
            raise Contradiction(f"{self.name}: its memory is not as long as its tables") from None
        extents = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in views)
        if any(end > begin for (_, end), (begin, _) in pairwise(extents)):
            raise Contradiction(f"{self.name}: its tables lie in one another's memory")
        return views


@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of a table, in a TBE.

    Attributes:
        tbe: the TBE.
        index: the table's number in it.
        row: the id of the first one.
        column: the first column.
    """

    tbe: Tbe
    index: int
    row: int = 0
    column: int = 0

    @property
    def table(self) -> str:
        """The table's name in its collection."""
        return str(self._spec[0])

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return int(self._spec[1])

    @property
    def dim(self) -> int:
        """Values of a row."""
        return int(self._spec[2])

    @property
    def value_type(self) -> str:
        """The type of values as fbgemm calls it: int8, int4, fp16 and so on."""
        return str(self._spec[3].value)

    def memory(self, width: int) -> torch.Tensor:
        """Their live memory [rows, width], without padding.

        Raises:
            Contradiction: they have none that could be written.
        """
        self.tbe.check()
        location = self._spec[4].name
        if location not in _WRITABLE:
            raise Contradiction(
                f"{self.tbe.name} keeps rows in {location} memory; expected {' or '.join(_WRITABLE)}"
            )
        view, padded = self.tbe.view(self.index), self._padded(width)
        if (view.shape, view.stride(), view.dtype) != ((self.rows, padded), (padded, 1), torch.uint8):
            raise Contradiction(
                f"{self.tbe.name} holds rows as {view.dtype} {list(view.shape)}, {view.stride()} apart; expected "
                f"bytes [{self.rows}, {padded}]: {width} aligned to {self.tbe.module.row_alignment}"
            )
        return view[:, :width]

    @property
    def scale_last(self) -> bool:
        """Whether scale and bias come at the end of a row, and not first."""
        return bool(self.tbe.module.reverse_qparam)

    @property
    def _spec(self) -> Any:
        return self.tbe.module.embedding_specs[self.index]

    def _padded(self, width: int) -> int:
        alignment: int = self.tbe.module.row_alignment
        return -(-width // alignment) * alignment


def tables_in_tbes(module: nn.Module) -> dict[str, list[Piece]]:
    """The tables in the TBEs of a module's quantised collections, by the names that their weights have there."""
    tables: dict[str, list[Piece]] = {}
    for owner, collection in module.named_modules():
        kind = TABLES_OF[not hasattr(collection, "embedding_bag_configs")]
        for piece in _pieces(owner, collection):
            name = f"{owner}.{kind}.{piece.table}.weight".removeprefix(".")
            tables.setdefault(name, []).append(piece)
    return tables


def tbe_prefixes(module: nn.Module, tables: Iterable[str]) -> tuple[str, ...]:
    """How the names of parameters and buffers begin that a module's TBEs have, or share with their `tables`."""
    registered = [f"{name}." for name, each in module.named_modules() if _is_tbe(each)]
    return (*registered, *(name.removesuffix("weight") for name in tables))


def tbe_memory(module: nn.Module) -> list[torch.Tensor]:
    """What a module's TBEs keep rows in."""
    tbes = {piece.tbe for pieces in tables_in_tbes(module).values() for piece in pieces}
    return [each for tbe in tbes for each in tbe.memory]


def _pieces(owner: str, collection: Any) -> Iterator[Piece]:
    sharded: dict[Any, Any] = getattr(collection, "_tbes_configs", {})
    tbes = sharded or [each for each in getattr(collection, "_emb_modules", ()) if _is_tbe(each)]
    for number, module in enumerate(tbes):
        tbe = Tbe(f"TBE {number} of {owner or 'the module'}", module)
        for index in range(len(module.embedding_specs)):
            config = sharded[module].embedding_tables[index] if sharded else None
            yield Piece(tbe, index, *(config.local_metadata.shard_offsets if config else ()))


def _is_tbe(module: Any) -> bool:
    return hasattr(module, "embedding_specs") and hasattr(module, "split_embedding_weights_with_scale_bias")
