"""TorchRec's training pipeline, for data that never end."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torchrec.distributed.train_pipeline.pipeline_context import In, Out
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _start_data_dist

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.trainer.distributed.ranks import ranks_of
from deltasync.trainer.distributed.start import begun_together
from deltasync.trainer.pipelines.batches import hand_over, to_device
from deltasync.trainer.pipelines.deferred_tables import DeferredTables
from deltasync.trainer.pipelines.lookahead.attachment import LookAhead
from deltasync.trainer.pipelines.lookahead.forwards import LookAheadContext
from deltasync.trainer.pipelines.options import WHY_NOT_TAKEN, PipelineOptions, refuse
from deltasync.trainer.pipelines.precision import LossScale, Step, autocast, refuse_backward_updates
from deltasync.trainer.pipelines.tensordicts import accept_tensordicts
from deltasync.trainer.tracking.torchrec_hooks import ReshardWatch


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
        **others: Any,
    ) -> None:
        """Attach to a model at the first `progress`. The ranks that share it call this together.

        Args:
            model: sharded, with its optimizer's parameters.
            optimizer: of everything that is not updated in backward.
            device: where the model is.
            options: how to train.
            others: arguments of TorchRec's pipelines, which are refused with the reason.

        Raises:
            InvalidInput: the model can't be trained as the options say, or ranks have different options; all ranks
                raise it. Or `options` are no options.
            TypeError: there are other arguments.
        """
        if others:
            refuse(others)
        options = options or PipelineOptions()
        if not isinstance(options, PipelineOptions):
            raise InvalidInput(f"options: {options!r}, expected PipelineOptions")
        with begun_together("OnlinePipeline", options.of_all_ranks, ranks_of(model)):
            if options.scales_loss:
                refuse_backward_updates(model)
            accept_tensordicts(model)
            super().__init__(model, optimizer, device, context_type=LookAheadContext)
            self._ahead = LookAhead(model, device, self._data_dist_stream, options.not_ahead)
            self._tables = DeferredTables(model, self._ahead) if options.defers_tables else None
        self._options, self._own_optimizer = options, optimizer
        self._pipelined_modules, self._pipelined_postprocs = self._ahead.modules, self._ahead.preprocessing
        self._in_flight = {model.training: _InFlight(self.batches, self.contexts), not model.training: _InFlight()}
        self._training = model.training
        self._cycle = AccumulationCycle(model, options.grad_accum)
        self._step = Step(optimizer, self._tables)
        self._reshard_watch = ReshardWatch(model)
        self._scale = LossScale(options.loss_scale, model, device) if options.scales_loss else None
        self.stepped, self.trained = False, 0
        self._failure, self._late = "", list[Exception]()

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train on the next batch, or evaluate it if the model is in evaluation mode; the output of its forward.

        Raises:
            StopIteration: there is none now.
            Contradiction: another kind of pipeline is attached to the model, or it was resharded in the middle of
                a step of deferred tables, or an earlier `progress` has failed in backward or later, on several
                ranks; or GradientAccumulationWrapper is around the pipeline.
        """
        self.stepped = False
        if self._failure:
            raise Contradiction(self._failure)
        if self._optimizer is not self._own_optimizer:
            raise Contradiction(f"GradientAccumulationWrapper: {WHY_NOT_TAKEN['pipeline']}; use grad_accum")
        if self._late:
            raise self._late.pop()
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
        if not self._options.enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
        if self._model.training and self._cycle.begins:
            self._begin_step()
        try:
            output = self._train(dataloader_iter) if self._model.training else self._evaluate(dataloader_iter)
        except BaseException as error:
            if self.contexts[0].started:  # Else forward has failed, which can be run again.
                self._leave_out(error)
            raise
        self.dequeue_batch()
        return output

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Take up to two batches, unless some are in flight. Ask an iterator that has ended again."""
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
        """Forget the batches in flight, and the micro-batches of a step that is not complete.

        After an error in backward, `progress` goes on then. That is right only where all ranks have failed alike.
        """
        super().reset()
        for waiting in self._in_flight.values():
            waiting.batches.clear()
            waiting.contexts.clear()
        self._forget_step(failed=bool(self._failure))
        self._failure, self._late = "", []

    def state_dict(self) -> dict[str, Any]:
        """The state to save beside model and optimizer, after a `progress` that has stepped."""
        return {"trained": self.trained, "loss_scale": self._scale.state_dict() if self._scale else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting batches, and with the same loss scale."""
        self.trained = state["trained"]
        if self._scale and state["loss_scale"]:
            self._scale.load_state_dict(state["loss_scale"])

    def _leave_out(self, error: BaseException) -> None:
        """Go on without the first batch in flight, whose lookups are used up; on several ranks, do not go on."""
        self.dequeue_batch()
        if len(ranks_of(self._model)) == 1:
            self._forget_step(failed=True)
            error.add_note(
                f"the batch after {self.trained} others is left out, and the micro-batches of its step before it; "
                "tables keep what its backward has changed; progress() goes on with the next batch"
            )
            return
        self._failure = (
            f"the batch after {self.trained} others has failed after its forward, with {type(error).__name__}: "
            f"{error}; ranks may wait in different collectives: end all ranks, and go on from a checkpoint. If "
            f"all have failed alike, reset() the pipeline to go on without that batch and the {len(self.batches)} "
            "in flight"
        )

    def _forget_step(self, *, failed: bool) -> None:
        """Begin the next step with the next batch."""
        if failed:
            self._cycle.forget_backward()
        if failed and self._scale:
            self._scale.forget_step()
        self._cycle.restart()
        self._step.forget()

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
        if self._reshard_watch.resharded():
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
        self._reshard_watch = ReshardWatch(self._model)

    def _forward(self, batch: In) -> tuple[torch.Tensor, Out]:
        self._ahead.in_forward = True
        try:
            with record_function(f"## forward {self.contexts[0].index} ##"), autocast(self._options, self._device):
                result = (self._options.custom_model_fwd or self._model)(batch)
            if not (isinstance(result, Sequence) and len(result) == 2):
                kind = type(result).__name__
                raise InvalidInput(f"the model's forward returned a {kind}, expected (loss, output)")
        except BaseException:
            self.contexts[0] = self._create_context()  # What was sent out ahead may have been used.
            raise
        finally:
            self._ahead.in_forward = False
        self._ahead.confirm()
        return result[0], result[1]

    def _forward_and_receive(self, dataloader_iter: Iterator[In]) -> tuple[torch.Tensor, Out]:
        result = self._forward(self.batches[0])
        if self._options.enqueue_batch_after_forward:
            try:
                self.enqueue_batch(dataloader_iter)
            except Exception as error:  # noqa: BLE001  # Anything that an iterator raises: the batch goes on.
                self._late.append(error)
        self._receive(1)
        return result

    def _evaluate(self, dataloader_iter: Iterator[In]) -> Out:
        with torch.no_grad():  # Else deferred tables would keep the lookup for the next step.
            _, output = self._forward_and_receive(dataloader_iter)
        return output

    def _begin_step(self) -> None:
        self._cycle.open()
        with record_function("## zero_grad ##"):
            self._optimizer.zero_grad()

    def _train(self, dataloader_iter: Iterator[In]) -> Out:
        closes = self._cycle.closes(last=len(self.batches) == 1)
        with self._cycle.micro_batch(closes=closes):
            losses, output = self._forward_and_receive(dataloader_iter)
            self._backward(losses)
        if closes:
            self._optimizer_step()
        # Ranks have trained equally often; their contexts are also counted where there was no batch.
        number = LookAheadContext(index=self.trained)
        self.sync_embeddings(self._model, self._options.dmp_collection_sync_interval_batches, number)
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


@dataclass
class _InFlight:
    """Batches that have been taken from an iterator and not been used yet, the next one first."""

    batches: deque[Any] = field(default_factory=deque)
    contexts: deque[LookAheadContext] = field(default_factory=deque)
    iterator: Iterator[Any] | None = None
    exhausted: bool = False


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
        reference = _OPEN.get(self._model)
        other = reference() if reference else None
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
        """Begin a new cycle."""
        self._done = 0

    def forget_backward(self) -> None:
        """Let the model's DDP modules stop waiting for the gradients of a backward that has failed."""
        for module in _with_lookups(self._model):
            if isinstance(module, DistributedDataParallel):
                module._has_rebuilt_buckets = False
                module.reducer._reset_state()

    def forget_reducers(self) -> None:
        """Find the model's DDP modules again: its lookups are new."""
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
