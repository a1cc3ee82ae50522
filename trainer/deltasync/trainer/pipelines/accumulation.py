"""Several micro-batches for one optimizer step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deltasync.core.errors import Contradiction

# The cycle whose gradients are in a model's parameters.
_OPEN = WeakKeyDictionary[nn.Module, "ref[AccumulationCycle]"]()


class AccumulationCycle:
    """Where training stands among the micro-batches of an optimizer step.

    Gradients are added up on each rank by itself; DDP averages them over ranks in the last micro-batch's backward.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        self._model, self._micro_batches = model, micro_batches
        self._done = 0
        self._reducers: list[DistributedDataParallel] | None = None

    @property
    def begins(self) -> bool:
        """Whether the next micro-batch is the first of its step."""
        return self._done == 0

    def open(self) -> None:
        """Begin a step.

        Raises:
            Contradiction: the model's gradients are those of another pipeline's step, which is not complete.
        """
        known = _OPEN.get(self._model)
        other = known() if known else None
        if other and other is not self and not other.begins:
            raise Contradiction("a step of another pipeline on this model is not complete: reset() that one first")
        _OPEN[self._model] = ref(self)

    def closes(self, *, last: bool) -> bool:
        """Whether a step is due after the next micro-batch: always after the `last` of the data."""
        return last or self._done + 1 == self._micro_batches

    def share(self, loss: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share in the loss of its step."""
        return loss / self._micro_batches if self._micro_batches > 1 else loss

    @contextmanager
    def micro_batch(self, *, closes: bool) -> Iterator[None]:
        """Forward and backward of a micro-batch. Ranks exchange gradients only in one that closes the step."""
        with ExitStack() as stack:
            for reducer in [] if closes else self._reducers_to_pause():
                stack.enter_context(reducer.no_sync())
            yield
        self._done += 1

    def close(self) -> float:
        """End the cycle; the factor that makes its gradients the mean over the micro-batches that it had."""
        correction = self._micro_batches / self._done
        self.restart()
        return correction

    def restart(self) -> None:
        """Begin a cycle anew."""
        self._done = 0

    def forget_backward(self) -> None:
        """Have the model's DDP modules wait no longer for the gradients of a backward that has failed."""
        for module in _with_lookups(self._model):
            if isinstance(module, DistributedDataParallel):
                module._has_rebuilt_buckets = False
                module.reducer._reset_state()

    def forget_reducers(self) -> None:
        """Look for the model's DDP modules anew: it has other lookups."""
        self._reducers = None

    def _reducers_to_pause(self) -> list[DistributedDataParallel]:
        """All of the model's DDP modules: the outermost, and those around data-parallel tables.

        One with a static graph learns the graph in the very first backward and has to exchange gradients there;
        a mean that is averaged over ranks again, in the last micro-batch, stays the same.
        """
        if self._reducers is None:
            self._reducers = [
                one for one in _with_lookups(self._model) if isinstance(one, DistributedDataParallel)
            ]
            return [reducer for reducer in self._reducers if not reducer.static_graph]
        return self._reducers


def _with_lookups(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, and the lookups of sharded ones, which keep them in plain lists."""
    for module in model.modules():
        yield module
        yield from getattr(module, "_lookups", ())
