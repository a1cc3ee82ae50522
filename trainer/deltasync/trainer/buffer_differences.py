"""Buffers of which ranks have different values: nothing but SyncBatchNorm keeps them alike."""

import logging
from collections.abc import Collection

from torch import nn

from deltasync.trainer.distributed.agreement import Agreement
from deltasync.trainer.tracking.module_tensors import buffer_digests

logger = logging.getLogger(__name__)


class BufferDifferences:
    """Compares them with the 1st, 2nd, 4th, 8th cut and so on: at first, all are alike.

    Attributes:
        names: the FQNs of those that were found to differ.
    """

    def __init__(self, model: nn.Module, agreement: Agreement, fqns_to_skip: Collection[str]) -> None:
        self.names = set[str]()
        self._model, self._agreement, self._fqns_to_skip = model, agreement, fqns_to_skip
        self._cuts = 0

    def note_cut(self) -> None:
        """Compare them, if it is time to. The log names each once. A collective: all ranks call it."""
        self._cuts += 1
        if self._agreement.world_size == 1 or self._cuts.bit_count() != 1:
            return
        found = self._agreement.differing(buffer_digests(self._model, self._fqns_to_skip))
        new = [name for name in found if name not in self.names]
        self.names.update(new)
        if new and self._agreement.rank == 0:
            logger.warning("buffers differ between ranks; those of rank 0 are published: %s", ", ".join(new))
