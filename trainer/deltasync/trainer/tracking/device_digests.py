"""Digests of rows that lie on a device, made there before they are copied to the host.

So they tell, too, whether the copy has their bits. As `core.digests` makes them of rows in host memory.
"""

from functools import lru_cache

import torch

from deltasync.core.digests import first_word, weights
from deltasync.core.tables import Shard

# Words are widened to 64 bits in blocks of so many.
_BLOCK_WORDS = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def row_digests(rows: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The digests of rows [n, cols] of a shard, where they lie: int64 [n], the bits of unsigned numbers."""
    words = rows.contiguous().view(_WORDS[rows.element_size()])
    factors = _weights(first_word(shard.col_offset, shard.table.dtype), words.shape[1], rows.device)
    mask = (1 << 8 * words.element_size()) - 1
    blocks = torch.split(words, max(1, _BLOCK_WORDS // words.shape[1]))
    return torch.cat([((block.long() & mask) * factors).sum(dim=1) for block in blocks])  # Modulo 2**64.


@lru_cache(256)
def _weights(first: int, words: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights(first, words).view("i8").copy()).to(device)
