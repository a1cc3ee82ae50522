"""TorchRec's training pipeline, for data that never end."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function
from torchrec.distributed.train_pipeline.pipeline_context import In, Out
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _start_data_dist

from deltasync.core.errors import Contradiction, InvalidInput
from deltasync.trainer.pipelines.accumulation import AccumulationCycle
from deltasync.trainer.pipelines.backward_updates import refuse_backward_updates
from deltasync.trainer.pipelines.batches import hand_over, to_device
from deltasync.trainer.pipelines.deferred_tables import DeferredTables
from deltasync.trainer.pipelines.lookahead.attachment import LookAhead
from deltasync.trainer.pipelines.lookahead.forwards import LookAheadContext
from deltasync.trainer.pipelines.options import PipelineOptions
from deltasync.trainer.pipelines.precision import LossScale, Step, autocast
from deltasync.trainer.pipelines.tensordicts import accept_tensordicts
from deltasync.trainer.tracking.new_lookups import LookupsHeld


@dataclass
class _InFlight:
    """Batches that have been taken from an iterator and not been used yet, the next one first."""

    batches: deque[Any] = field(default_factory=deque)
    contexts: deque[LookAheadContext] = field(default_factory=deque)
    iterator: Iterator[Any] | None = None
    exhausted: bool = False


class OnlinePipeline(TrainPipelineSparseDist[In, Out]):  # type: ignore[misc]  # torchrec's types
    """TorchRec's pipeline of three stages, for training that goes on for as long as there is data.

    While one batch is trained on, the ids of the next are sent to the ranks that hold their rows, after what
    preprocessing they need, and the one after that is copied to the device. The model's forward takes a batch and
    returns `(loss, output)`; batches are Pipelineable, or TensorDicts.

    Every batch is trained on exactly once, in the order of the iterator. A batch that was loaded while the model
    was in training mode is trained on later, even if others are evaluated in between. An iterator may end, or
    yield None, for a while: the batches in flight are trained on, then the iterator is asked again, and `progress`
    raises StopIteration if there is still nothing. All ranks need the same number of batches (see
    `LockstepBatches`). Do not write to a batch once the pipeline has it.

    Everything runs in the thread that calls `progress`, but for the hooks of backward, which run in autograd's. On
    a GPU, copies and the work ahead run on streams of their own.

    Attributes:
        stepped: the last `progress` ended an optimizer step, even one that was left out for an overflow.
        trained: batches trained on so far.
    """

    _model: nn.Module
    batches: deque[Any]
    contexts: deque[LookAheadContext]
    _dataloader_iter: Iterator[Any] | None
    _dataloader_exhausted: bool

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        options: PipelineOptions | None = None,
    ) -> None:
        """Attach to a model at the first `progress`.

        Args:
            model: sharded, with its optimizer's parameters.
            optimizer: of everything that is not updated in backward.
            device: where the model is.
            options: how to train.

        Raises:
            InvalidInput: the model can't be trained as the options say.
        """
        options = options or PipelineOptions()
        if options.scales_loss:
            refuse_backward_updates(model)
        accept_tensordicts(model)
        super().__init__(model, optimizer, device, context_type=LookAheadContext, custom_model_fwd=self._forward)
        self._options = options
        self._ahead = LookAhead(model, device, self._data_dist_stream, options.not_ahead)
        self._pipelined_modules, self._pipelined_postprocs = self._ahead.modules, self._ahead.preprocessing
        self._in_flight = {model.training: _InFlight(self.batches, self.contexts), not model.training: _InFlight()}
        self._training = model.training
        self._cycle = AccumulationCycle(model, options.grad_accum)
        self._tables = DeferredTables(model, self._ahead) if options.defers_tables else None
        self._step = Step(optimizer, self._tables)
        self._lookups_held = LookupsHeld(model)
        self._scale = LossScale(options.loss_scale, model, device) if options.scales_loss else None
        self.stepped, self.trained = False, 0

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on the next batch, or evaluate it if the model is in evaluation mode; the output of its forward.

        Raises:
            StopIteration: there is none now.
            Contradiction: another kind of pipeline is attached to the model, or it was resharded in the middle of
                a step of deferred tables.
        """
        self.stepped = False
        self._take_batches_of_mode()
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        self._ensure_attached()
        self.start_sparse_data_dist(self.batches[0], self.contexts[0])
        self._receive(0)
        self._set_module_context(self.contexts[0])
        with record_function(f"## wait_for_batch {self.contexts[0].index} ##"):
            hand_over(self.batches[0], self._data_dist_stream)
        if len(self.batches) > 1:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])
        self.enqueue_batch(dataloader_iter)
        output = self._train() if self._model.training else self._evaluate()
        self.dequeue_batch()
        return output

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Take up to two batches, unless some are in flight. An iterator that had no more is asked again."""
        if not self.batches:
            self._dataloader_exhausted = False
        while len(self.batches) < 2 and self.enqueue_batch(dataloader_iter):
            pass

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, LookAheadContext]:
        """Take a batch, if there is one, and copy it to the device, on the stream for copies."""
        context = self._create_context()
        with (
            record_function(f"## copy_batch_to_gpu {context.index} ##"),
            self._stream_context(self._memcpy_stream),
        ):
            batch = self._next_batch(dataloader_iter)
            return (None if batch is None else to_device(batch, self._device)), context

    def start_sparse_data_dist(self, batch: In | None, context: LookAheadContext) -> None:
        """Do a batch's preprocessing and send its ids out, on the stream for that, once it is on the device."""
        if batch is None or context.started:
            return
        with (
            record_function(f"## start_sparse_data_dist {context.index} ##"),
            self._stream_context(self._data_dist_stream),
        ):
            hand_over(batch, self._memcpy_stream)
            with autocast(self._options, self._device):
                self._ahead.compute(batch, context)
            _start_data_dist(self._ahead.modules, context, context)
        context.started = True
        self._ahead.share_splits()

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:  # noqa: ARG002
        """Attach to the model again, if there are batches in flight; else, the next `progress` does.

        Raises:
            Contradiction: it is another model, or another kind of pipeline is attached to it.
        """
        if model is not None and model is not self._model:
            raise Contradiction("a pipeline stays with its model: make a new one for another")
        if self.batches:
            hand_over(self.batches[0], self._memcpy_stream)
            self._ahead.attach(self.batches[0])

    def detach(self) -> nn.Module:
        """Give the model back as it was, except that it still takes TensorDicts.

        Batches in flight, and the gradients of an incomplete step, are kept for when `progress` attaches again.
        """
        self._ahead.detach()
        if self._tables:
            self._tables.detach()
        return self._model

    def reset(self) -> None:
        """Forget the batches in flight, and the micro-batches of a step that is not complete."""
        super().reset()
        for waiting in self._in_flight.values():
            waiting.batches.clear()
            waiting.contexts.clear()
        self._cycle.restart()
        self._step.forget()

    def state_dict(self) -> dict[str, Any]:
        """What to save beside model and optimizer, after a `progress` that has stepped."""
        return {"trained": self.trained, "loss_scale": self._scale.state_dict() if self._scale else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting batches, and with the same loss scale."""
        self.trained = state["trained"]
        if self._scale and state["loss_scale"]:
            self._scale.load_state_dict(state["loss_scale"])

    def _take_batches_of_mode(self) -> None:
        if self._model.training == self._training:
            return
        self.detach()
        before, now = self._in_flight[self._training], self._in_flight[not self._training]
        before.iterator, before.exhausted = self._dataloader_iter, self._dataloader_exhausted
        self.batches, self.contexts = now.batches, now.contexts
        self._dataloader_iter, self._dataloader_exhausted = now.iterator, now.exhausted
        self._training = self._model.training

    def _ensure_attached(self) -> None:
        if self._lookups_held.renewed():
            self._follow_resharding()
        if self._ahead.outdated:
            self.detach()
        if not self._ahead.attached:
            self.attach()
        self._ahead.check()
        if self._tables:
            self._tables.attach()

    def _follow_resharding(self) -> None:
        """Attach to the model's new lookups. Ids in flight were sent to the ranks that had their rows before."""
        if self._tables and self._tables.outputs:
            raise Contradiction(
                "the model was resharded in the middle of an optimizer step, whose gradients are those of the "
                "lookups it had: reshard it where the pipeline has `stepped`, or reset() the pipeline"
            )
        self.detach()
        if self._tables:
            self._tables.find_lookups()
        self._cycle.forget_reducers()
        for waiting in self._in_flight.values():
            for place in range(len(waiting.contexts)):
                waiting.contexts[place] = self._create_context()
        self._lookups_held = LookupsHeld(self._model)

    def _forward(self, batch: In) -> tuple[torch.Tensor, Out]:
        self._ahead.in_forward = True
        try:
            with record_function(f"## forward {self.contexts[0].index} ##"), autocast(self._options, self._device):
                found = self._model(batch)
        except BaseException:
            self.contexts[0] = self._create_context()  # What was sent out ahead may have been used.
            raise
        finally:
            self._ahead.in_forward = False
        self._ahead.confirm()
        if not (isinstance(found, Sequence) and len(found) == 2):
            raise InvalidInput(f"the model's forward returned a {type(found).__name__}, expected (loss, output)")
        return found[0], found[1]

    def _evaluate(self) -> Out:
        with torch.no_grad():  # Else deferred tables would keep the lookup for the next step.
            _, output = self._forward(self.batches[0])
        self._receive(1)
        return output

    def _train(self) -> Out:
        if self._cycle.begins:
            self._cycle.open()
            with record_function("## zero_grad ##"):
                self._optimizer.zero_grad()
        closes = self._cycle.closes(last=len(self.batches) == 1)
        with self._cycle.micro_batch(closes=closes):
            losses, output = self._forward(self.batches[0])
            self._receive(1)
            self._backward(losses)
        if closes:
            self._optimizer_step()
        self.sync_embeddings(self._model, self._dmp_collection_sync_interval_batches, self.contexts[0])
        self.stepped = closes
        self.trained += 1
        return output

    def _receive(self, place: int) -> None:
        """Begin to receive the ids of a batch in flight, unless there is none or that has begun."""
        if len(self.contexts) > place and self.contexts[place].fused_splits_awaitables:
            self.wait_sparse_data_dist(self.contexts[place])

    def _backward(self, losses: torch.Tensor) -> None:
        loss = self._cycle.share(losses)
        super()._backward(self._scale.scaled(loss) if self._scale else loss)

    def _optimizer_step(self) -> None:
        with record_function(f"## optimizer {self.contexts[0].index} ##"):
            if self._scale:
                self._scale.step(self._step, self._close_cycle)
            else:
                self._close_cycle()
                self._step.step()

    def _close_cycle(self) -> None:
        """End the cycle; one that ended early, with the data, steps by the mean over the micro-batches it had."""
        correction = self._cycle.close()
        if correction != 1:
            torch._foreach_mul_(self._step.gradients, correction)
