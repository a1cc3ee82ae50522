from typing import Any

import pytest
import torch

from deltasync.core.errors import InvalidInput
from deltasync.trainer.pipelines.options import PipelineOptions

FLOAT16 = {"enable_amp": True, "amp_dtype": torch.float16}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"grad_accum": 0}, "grad_accum: 0, expected a whole number of at least 1"),
        ({"grad_accum": -3}, "grad_accum: -3, expected a whole number of at least 1"),
        ({"loss_scale": 0.0}, "loss_scale: 0.0, expected a positive number"),
        ({"loss_scale": -1.0}, "loss_scale: -1.0, expected a positive number"),
        ({"loss_scale": float("inf")}, "loss_scale: inf, expected a positive number"),
        ({"loss_scale": float("nan")}, "loss_scale: nan, expected a positive number"),
        ({"amp_dtype": torch.float32}, "amp_dtype: torch.float32, expected torch.bfloat16 or torch.float16"),
        ({"not_ahead": "hash"}, "not_ahead: 'hash', expected several names"),
        ({"amp_dtype": torch.float64}, "amp_dtype: torch.float64, expected torch.bfloat16 or torch.float16"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        PipelineOptions(**options)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("options", "scales_loss", "defers_tables"),
    [
        ({}, False, False),
        ({"grad_accum": 4}, False, False),
        ({"accumulate_tables": True}, False, False),  # One micro-batch: its backward is the step's.
        ({"grad_accum": 2, "accumulate_tables": True}, False, True),
        ({"enable_amp": True}, False, False),
        ({"enable_amp": True, "grad_accum": 2}, False, False),
        ({"amp_dtype": torch.float16}, False, False),
        (FLOAT16, True, True),
        (FLOAT16 | {"grad_accum": 4}, True, True),
    ],
)
def test_what_follows(options: dict[str, Any], scales_loss: bool, defers_tables: bool) -> None:
    chosen = PipelineOptions(**options)
    assert (chosen.scales_loss, chosen.defers_tables) == (scales_loss, defers_tables)


def test_defaults() -> None:
    chosen = PipelineOptions()
    assert (chosen.grad_accum, chosen.accumulate_tables, chosen.enable_amp) == (1, False, False)
    assert (chosen.amp_dtype, chosen.loss_scale) == (torch.bfloat16, 65_536)
