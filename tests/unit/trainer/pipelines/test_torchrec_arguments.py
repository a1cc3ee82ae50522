"""The arguments of TorchRec's pipelines: each is taken, or refused with a reason, and the README says which."""

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
ROWS = re.findall(
    r"^\| `(\w+)`( \(TorchRec 1\.9\))? \| (.*?) ?\| (taken|not taken: .*?)(?:; .*)? \|$", SECTION, re.M
)
REASONS = dict(re.findall(r"^\| `(\w+)`.* \| not taken: (.*) \|$", SECTION, re.M))
NEWER = {name for name, newer, *_ in ROWS if newer}

CLASSES = [
    EvalPipelineSparseDist,
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    TrainEvalHybridPipelineBase,
    TrainPipelineBase,
    TrainPipelineSparseDist,
]
ARGUMENTS = {name: one for kind in CLASSES for name, one in inspect.signature(kind).parameters.items()}


def test_the_table_has_the_arguments_of_the_installed_torchrec() -> None:
    assert {kind.__name__ for kind in CLASSES} == set(
        re.findall(r"`([A-Z]\w+(?:Dist|Base|Wrapper|Config))`", SECTION)
    )
    listed = [name for name, *_ in ROWS]
    assert len(listed) == len(set(listed)) == len(re.findall(r"^\| `", SECTION, re.M))
    assert set(listed) - NEWER <= ARGUMENTS.keys() <= set(listed)


def test_the_table_has_their_defaults() -> None:
    for name, _, default, _ in ROWS:
        if name in ARGUMENTS:
            found = ARGUMENTS[name].default
            expected = "" if found is inspect.Parameter.empty else getattr(found, "__name__", str(found))
            assert default.strip("`") == expected, name


def test_what_is_taken_is_an_argument_or_an_option_with_the_same_default() -> None:
    own = inspect.signature(OnlinePipeline).parameters
    options = {field.name: field.default for field in fields(PipelineOptions)}
    for name in (name for name, *_, here in ROWS if here == "taken"):
        assert name in own or options[name] == ARGUMENTS[name].default


def test_what_is_not_taken_is_refused_for_the_reason_in_the_table() -> None:
    assert REASONS == WHY_NOT_TAKEN
    for name, reason in REASONS.items():
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
