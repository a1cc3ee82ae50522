"""What TorchRec's training pipelines lack."""

from trainer.pipelines.features import to_kjt
from trainer.pipelines.online import OnlinePipeline
from trainer.pipelines.options import PipelineOptions
from trainer.pipelines.tensordicts import accept_tensordicts
from trainer.pipelines.together import Together

__all__ = ["OnlinePipeline", "PipelineOptions", "Together", "accept_tensordicts", "to_kjt"]
