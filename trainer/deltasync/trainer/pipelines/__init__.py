"""A training pipeline for endless data, and TensorDicts as input of embedding modules."""

from deltasync.trainer.pipelines.batches import LockstepBatches
from deltasync.trainer.pipelines.online_pipeline import OnlinePipeline
from deltasync.trainer.pipelines.options import PipelineOptions
from deltasync.trainer.pipelines.tensordicts import accept_tensordicts, to_kjt

__all__ = ["LockstepBatches", "OnlinePipeline", "PipelineOptions", "accept_tensordicts", "to_kjt"]
