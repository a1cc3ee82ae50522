"""The training of a click model, from its first step to its last."""

import logging

from torch.nn.functional import binary_cross_entropy_with_logits

from deltasync.core.errors import DeltasyncError, ServiceUnavailable
from deltasync.trainer.clicks.checkpoints import Checkpoints
from deltasync.trainer.clicks.micro_batches import TimedBatches
from deltasync.trainer.clicks.results import Results
from deltasync.trainer.pipelines import OnlinePipeline
from deltasync.trainer.scalars import Scalars
from deltasync.trainer.sync import DeltaSync, OnRefusal

logger = logging.getLogger(__name__)

# So long a service that is away keeps training from its first step, and its end from being saved.
_PATIENCE_SECONDS = 60.0


class Training:
    """A pipeline, what it publishes, and what it leaves behind."""

    def __init__(
        self,
        pipeline: OnlinePipeline,
        sync: DeltaSync,
        on_refusal: OnRefusal,
        scored: Results | None = None,
        checkpoints: Checkpoints | None = None,
        scalars: Scalars | None = None,
    ) -> None:
        self._pipeline, self._sync, self._on_refusal = pipeline, sync, on_refusal
        self._scored, self._checkpoints, self._scalars = scored, checkpoints, scalars

    def run(self, batches: TimedBatches) -> None:
        """Train on all batches.

        Raises:
            DeltasyncError: what was learnt could not be published in the end; the last checkpoint has it.
        """
        self._publish_first()
        while self._step(batches):
            pass
        try:
            self._publish_last()
        except DeltasyncError:
            self._end()
            raise
        self._end()

    def _publish_first(self) -> None:
        """Publish the model before its first step, so that replicas hold it."""
        raises = self._on_refusal is OnRefusal.RAISE
        try:
            self._sync.flush(None if raises else _PATIENCE_SECONDS)
        except DeltasyncError as error:
            if raises:
                raise
            logger.warning("training begins, though nothing is published: %s", error)

    def _publish_last(self) -> None:
        """Publish all that was learnt, so that the last checkpoint is of the newest version. Where the service is
        away, that is waited for, with a checkpoint of now.
        """
        if self._checkpoints:
            try:
                self._sync.flush(_PATIENCE_SECONDS)
            except ServiceUnavailable as error:
                logger.warning("a checkpoint is saved before the end is published: %s", error)
                self._checkpoints.save()
        self._sync.flush()

    def _step(self, batches: TimedBatches) -> bool:
        """Train on a batch; whether there was one."""
        try:
            output = self._pipeline.progress(batches)
        except StopIteration:
            return False
        if self._scored:
            self._scored.add(output, step_ended=self._pipeline.stepped)
        event_time_unix_ns = batches.trained()
        if self._pipeline.stepped:
            self._sync.step(event_time_unix_ns)
            if self._scalars and self._scalars.due:
                _, logit, label = output
                self._scalars.step(loss=binary_cross_entropy_with_logits(logit, label))
            if self._checkpoints:
                self._checkpoints.step()
        return True

    def _end(self) -> None:
        if self._checkpoints:
            self._checkpoints.finish()
