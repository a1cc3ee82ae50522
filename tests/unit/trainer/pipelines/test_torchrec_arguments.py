"""Each argument of TorchRec's pipelines is taken, or refused with a reason, and the README says which."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.experimental_pipelines import TrainEvalHybridPipelineBase

import deltasync.trainer.pipelines
from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions
from deltasync.trainer.pipelines.options import WHY_NOT_TAKEN

README = Path(deltasync.trainer.pipelines.__file__).with_name("README.md").read_text()
_, _, SECTION = README.partition("\n## Arguments of TorchRec's pipelines\n")
# Of TorchRec 1.9.
NEWER = {"async_inplace_copy"}

CLASSES = [
    EvalPipelineSparseDist,
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    TrainEvalHybridPipelineBase,
    TrainPipelineBase,
    TrainPipelineSparseDist,
]
ARGUMENTS = {name: one for kind in CLASSES for name, one in inspect.signature(kind).parameters.items()}


def test_every_argument_of_the_installed_torchrec_is_taken_or_refused() -> None:
    own = inspect.signature(OnlinePipeline).parameters
    options = {field.name: field.default for field in fields(PipelineOptions)}
    assert WHY_NOT_TAKEN.keys() - NEWER <= ARGUMENTS.keys()
    for name in ARGUMENTS.keys() - WHY_NOT_TAKEN.keys():
        assert name in own or options[name] == ARGUMENTS[name].default


def test_the_readme_lists_what_is_refused() -> None:
    assert set(re.findall(r"`(\w+)`", SECTION.partition("says why:")[2])) == WHY_NOT_TAKEN.keys()


def test_what_is_not_taken_is_refused_with_its_reason() -> None:
    for name, reason in WHY_NOT_TAKEN.items():
        with pytest.raises(TypeError, match=f"does not take {name}: {re.escape(reason)}$"):
            pipeline(**{name: True})


def test_what_is_an_option_is_to_be_given_as_one() -> None:
    for name in ("enqueue_batch_after_forward", "grad_accum"):
        with pytest.raises(TypeError, match=rf"PipelineOptions\({name}=\.\.\.\)"):
            pipeline(**{name: 1})


def test_an_argument_of_nobody_is_refused_and_so_is_one_by_its_place() -> None:
    with pytest.raises(TypeError, match="OnlinePipeline has no argument 'optoins'"):
        pipeline(optoins=PipelineOptions())
    with pytest.raises(InvalidInput, match="options: True, expected PipelineOptions"):
        pipeline(options=True)


@pytest.mark.parametrize("interval", [0, -1, 1.5, True])
def test_an_interval_is_a_whole_number_or_none(interval: Any) -> None:
    with pytest.raises(InvalidInput, match="dmp_collection_sync_interval_batches: "):
        PipelineOptions(dmp_collection_sync_interval_batches=interval)
    assert PipelineOptions(dmp_collection_sync_interval_batches=None)


def pipeline(**arguments: Any) -> OnlinePipeline:
    """Not one is made here: arguments are looked at before the model is."""
    nothing: Any = None
    return OnlinePipeline(nothing, nothing, nothing, **arguments)
