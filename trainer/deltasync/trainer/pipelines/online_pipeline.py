"""TorchRec's training pipeline for endless data."""

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
from deltasync.trainer.distributed.ranks import begun_together, ranks_of
from deltasync.trainer.pipelines.batches import hand_over, to_device
from deltasync.trainer.pipelines.deferred_tables import DeferredTables
from deltasync.trainer.pipelines.lookahead import LookAhead, LookAheadContext
from deltasync.trainer.pipelines.options import PipelineOptions
from deltasync.trainer.pipelines.precision import LossScale, Step, autocast, refuse_backward_updates
from deltasync.trainer.pipelines.tensordicts import accept_tensordicts
from deltasync.trainer.tracking.torchrec_hooks import ReshardWatch


class OnlinePipeline(TrainPipelineSparseDist[In, Out]):  # type: ignore[misc]  # torchrec's types
    """TorchRec's pipeline of three stages, for training on data without an end.

    While the model trains on one batch, the pipeline preprocesses the next batch and sends its ids to the ranks
    that have their rows, and copies the batch after that to the device. The model's forward takes a batch and
    returns `(loss, output)`. Batches are Pipelineable or TensorDicts.

    The pipeline trains on every batch exactly once, in the order of the iterator. It keeps batches that it loaded
    in training mode for training, even if it evaluates others in between. An iterator may end, or yield None, for
    a while. The pipeline then trains on the batches in flight and asks the iterator again; if there is still no
    batch, `progress` raises StopIteration. All ranks need the same number of batches (see `LockstepBatches`). Do
    not write to a batch after the pipeline has loaded it.

    Everything runs in the thread that calls `progress`, except the hooks of backward, which run in autograd's
    threads. On a GPU, copies and the work ahead run on separate streams.

    Attributes:
        stepped: whether the last `progress` ended an optimizer step, even one that was skipped for an overflow.
        trained: number of batches trained on so far.
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
        """Prepare a pipeline, which attaches to the model at the first `progress`.

        All ranks that share the model call this together.

        Args:
            model: a sharded model.
            optimizer: the optimizer of all parameters that are not updated in backward.
            device: the device of the model.
            options: how to train.

        Raises:
            InvalidInput: the model does not support the options, or ranks have different options; all ranks raise
                it. Also raised if `options` is not a `PipelineOptions`.
        """
        options = options or PipelineOptions()
        if not isinstance(options, PipelineOptions):
            raise InvalidInput(f"options: {options!r}, expected PipelineOptions")
        with begun_together("OnlinePipeline", options.of_all_ranks, ranks_of(model)):
            if options.scales_loss:
                refuse_backward_updates(model)
            accept_tensordicts(model)
            super().__init__(model, optimizer, device, context_type=LookAheadContext)
            self._ahead = LookAhead(model, device, self._data_dist_stream, options.not_ahead)
            self._tables = DeferredTables(model, lambda: self._ahead.in_forward) if options.defers_tables else None
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
        """Train on the next batch, or evaluate it if the model is in evaluation mode.

        Returns:
            The output of the model's forward.

        Raises:
            StopIteration: there is no batch now.
            Contradiction: another kind of pipeline is attached to the model; or the model was resharded in the
                middle of an optimizer step with deferred tables; or, with several ranks, an earlier `progress` has
                failed after its forward; or a GradientAccumulationWrapper wraps the pipeline.
        """
        self.stepped = False
        if self._failure:
            raise Contradiction(self._failure)
        if self._optimizer is not self._own_optimizer:
            raise Contradiction(
                "GradientAccumulationWrapper: OnlinePipeline accumulates gradients itself; use grad_accum"
            )
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
            self._cycle.open()
            with record_function("## zero_grad ##"):
                self._optimizer.zero_grad()
        try:
            if self._model.training:
                output = self._train(dataloader_iter)
            else:
                with torch.no_grad():  # Otherwise deferred tables would keep the lookup for the next step.
                    _, output = self._forward_and_receive(dataloader_iter)
        except BaseException as error:
            if self.contexts[0].started:  # Otherwise forward has failed, and can run again.
                self._leave_out(error)
            raise
        self.dequeue_batch()
        return output

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Load batches until two are in flight. If none are, ask the iterator again even if it has ended."""
        if not self.batches:
            self._dataloader_exhausted = False
        while len(self.batches) < 2 and self.enqueue_batch(dataloader_iter):
            pass

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, LookAheadContext]:
        """Load the next batch, if there is one, and copy it to the device on the stream for copies."""
        context = self._create_context()
        with (
            record_function(f"## copy_batch_to_gpu {context.index} ##"),
            self._stream_context(self._memcpy_stream),
        ):
            batch = self._next_batch(dataloader_iter)
            return (None if batch is None else to_device(batch, self._device)), context

    def start_sparse_data_dist(self, batch: In | None, context: LookAheadContext) -> None:
        """Preprocess a batch and send its ids to their ranks, on the stream for that."""
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
        """Attach to the model again if there are batches in flight; otherwise the next `progress` attaches."""
        if model is not None and model is not self._model:
            raise Contradiction("a pipeline stays with its model: make a new one for another")
        if self.batches:
            hand_over(self.batches[0], self._memcpy_stream)
            self._ahead.attach(self.batches[0])

    def detach(self) -> nn.Module:
        """Restore the model, except that it still accepts TensorDicts.

        The pipeline keeps the batches in flight and the gradients of an incomplete step. The next `progress`
        attaches again.
        """
        self._ahead.detach()
        if self._tables:
            self._tables.detach()
        return self._model

    def reset(self) -> None:
        """Drop the batches in flight and the micro-batches of an incomplete step.

        `progress` can then continue after an error in backward. That is only correct if all ranks have failed in
        the same way.
        """
        super().reset()
        for waiting in self._in_flight.values():
            waiting.batches.clear()
            waiting.contexts.clear()
        self._forget_step(failed=bool(self._failure))
        self._failure, self._late = "", []

    def state_dict(self) -> dict[str, Any]:
        """The state to save together with model and optimizer, after a `progress` that has `stepped`."""
        return {"trained": self.trained, "loss_scale": self._scale.state_dict() if self._scale else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the saved number of batches and loss scale."""
        self.trained = state["trained"]
        if self._scale and state["loss_scale"]:
            self._scale.load_state_dict(state["loss_scale"])

    def _leave_out(self, error: BaseException) -> None:
        """Drop the first batch in flight, whose lookups are used up; with several ranks, stop the pipeline."""
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
        """Drop the current step: the next batch begins a new one."""
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
        """Attach to the model's new lookups, and send ids in flight again, to the new ranks of their rows."""
        if self._tables and self._tables.outputs:
            raise Contradiction(
                "the model was resharded in the middle of an optimizer step, whose gradients belong to the old "
                "lookups: reshard it when the pipeline has `stepped`, or reset() the pipeline"
            )
        self.detach()
        if self._tables:
            self._tables.find_lookups()
        self._cycle.reducers = None
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
            self.contexts[0] = self._create_context()  # Forward may have used the ids that were sent out ahead.
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
            except Exception as error:  # noqa: BLE001  # The next `progress` raises it; this batch continues.
                self._late.append(error)
        self._receive(1)
        return result

    def _train(self, dataloader_iter: Iterator[In]) -> Out:
        closes = self._cycle.closes(last=len(self.batches) == 1)
        with self._cycle.micro_batch(closes=closes):
            losses, output = self._forward_and_receive(dataloader_iter)
            self._backward(losses)
        if closes:
            self._optimizer_step()
        # Use `trained`, which is equal on all ranks. The index of a context also counts attempts without a batch.
        number = LookAheadContext(index=self.trained)
        self.sync_embeddings(self._model, self._options.dmp_collection_sync_interval_batches, number)
        self.stepped = closes
        self.trained += 1
        return output

    def _receive(self, place: int) -> None:
        """Start to receive the ids of a batch in flight, if there is one and it has not started yet."""
        if len(self.contexts) > place and self.contexts[place].fused_splits_awaitables:
            self.wait_sparse_data_dist(self.contexts[place])

    def _backward(self, losses: torch.Tensor) -> None:
        loss = self._cycle.share(losses)
        super()._backward(self._scale.scale(loss) if self._scale else loss)

    def _optimizer_step(self) -> None:
        with record_function(f"## optimizer {self.contexts[0].index} ##"):
            if self._scale:
                self._scale.take(self._step, self._close_cycle)
            else:
                self._close_cycle()
                self._step.step()

    def _close_cycle(self) -> None:
        """End the cycle. If the data ended early, average the gradients over the micro-batches that there were."""
        correction = self._cycle.close()
        if correction != 1:
            torch._foreach_mul_(self._step.gradients, correction)


@dataclass
class _InFlight:
    """Batches loaded from an iterator but not used yet, the next one first."""

    batches: deque[Any] = field(default_factory=deque)
    contexts: deque[LookAheadContext] = field(default_factory=deque)
    iterator: Iterator[Any] | None = None
    exhausted: bool = False


# The cycle whose gradients are in a model's parameters.
_OPEN = WeakKeyDictionary[nn.Module, "ref[AccumulationCycle]"]()


class AccumulationCycle:
    """Progress through the micro-batches of an optimizer step.

    Each rank adds up its own gradients. DDP averages them over ranks in the backward of the last micro-batch.
    """

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        self._model, self._micro_batches = model, micro_batches
        self._done = 0
        self.reducers: list[DistributedDataParallel] | None = None  # None: find them at the next micro-batch.

    @property
    def begins(self) -> bool:
        """Whether the next micro-batch is the first of its step."""
        return self._done == 0

    def open(self) -> None:
        """Begin a step, unless the model has gradients of an incomplete step of another pipeline."""
        reference = _OPEN.get(self._model)
        other = reference() if reference else None
        if other and other is not self and not other.begins:
            raise Contradiction("a step of another pipeline on this model is not complete: reset() that one first")
        _OPEN[self._model] = ref(self)

    def closes(self, *, last: bool) -> bool:
        """Whether the next micro-batch ends the step; the `last` of the data always does."""
        return last or self._done + 1 == self._micro_batches

    def share(self, loss: torch.Tensor) -> torch.Tensor:
        """The contribution of a micro-batch to the loss of its step."""
        return loss / self._micro_batches if self._micro_batches > 1 else loss

    @contextmanager
    def micro_batch(self, *, closes: bool) -> Iterator[None]:
        """Run a micro-batch in this block. Ranks only exchange gradients in one that closes the step."""
        with ExitStack() as stack:
            for reducer in [] if closes else self._reducers_to_pause():
                stack.enter_context(reducer.no_sync())
            yield
        self._done += 1

    def close(self) -> float:
        """End the cycle. Returns the factor that turns its gradients into the mean over its micro-batches."""
        correction = self._micro_batches / self._done
        self.restart()
        return correction

    def restart(self) -> None:
        """Begin a new cycle."""
        self._done = 0

    def forget_backward(self) -> None:
        """Reset the model's DDP modules, which still wait for gradients of a failed backward."""
        for module in _with_lookups(self._model):
            if isinstance(module, DistributedDataParallel):
                module._has_rebuilt_buckets = False
                module.reducer._reset_state()

    def _reducers_to_pause(self) -> list[DistributedDataParallel]:
        """The model's DDP modules: the outermost one, and those around data-parallel tables.

        One with a static graph learns the graph in its very first backward, so it must exchange gradients there.
        Averaging these over ranks again in the last micro-batch does not change them.
        """
        if self.reducers is None:
            self.reducers = [one for one in _with_lookups(self._model) if isinstance(one, DistributedDataParallel)]
            return [reducer for reducer in self.reducers if not reducer.static_graph]
        return self.reducers


def _with_lookups(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, including the lookups, which sharded modules keep in plain lists."""
    for module in model.modules():
        yield module
        yield from getattr(module, "_lookups", ())
