"""Options that are refused when they are made, with the field and its value, and what follows of others."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.documents import document

from deltasync.base.errors import InvalidInput
from deltasync.client import Part, Position
from deltasync.trainer.example.options import ModelOptions, StreamOptions
from deltasync.trainer.pipelines import PipelineOptions
from deltasync.trainer.sync import SyncOptions
from deltasync.trainer.sync_options import SyncStats
from deltasync.trainer.tracking import TrackerOptions, TrackingMode

# The whole numbers of each kind of options; what else it needs.
COUNTS: list[tuple[Callable[..., Any], str, dict[str, Any]]] = [
    (PipelineOptions, "grad_accum", {}),
    (SyncOptions, "publish_every", {"service": "localhost:1", "model": "clicks"}),
    *((ModelOptions, name, {}) for name in ("users", "items", "cross_buckets", "dim", "hidden")),
    (StreamOptions, "batch_size", {}),
]
NUMBERS: list[tuple[Callable[..., Any], str, dict[str, Any]]] = [
    (PipelineOptions, "loss_scale", {}),
    (StreamOptions, "events_per_second", {}),
]


@pytest.mark.parametrize("value", [2.5, 2.0, True, False, 0, -3, "2", None])
@pytest.mark.parametrize(("options", "name", "others"), COUNTS)
def test_a_number_that_is_not_whole_and_positive_is_refused(
    options: Callable[..., Any], name: str, others: dict[str, Any], value: object
) -> None:
    with pytest.raises(ValueError, match="expected a whole number of at least") as refused:
        options(**others | {name: value})
    assert str(refused.value).startswith(f"{name}: {value!r}, ")


@pytest.mark.parametrize(("options", "name", "others"), COUNTS)
def test_a_whole_number_of_numpy_is_one(options: Callable[..., Any], name: str, others: dict[str, Any]) -> None:
    assert getattr(options(**others | {name: np.int64(4)}), name) == 4


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "2", None])
@pytest.mark.parametrize(("options", "name", "others"), NUMBERS)
def test_a_number_that_is_not_positive_and_finite_is_refused(
    options: Callable[..., Any], name: str, others: dict[str, Any], value: object
) -> None:
    with pytest.raises(ValueError, match="expected a positive number") as refused:
        options(**others | {name: value})
    assert str(refused.value).startswith(f"{name}: {value!r}, ")


@pytest.mark.parametrize(("options", "name"), [
    (PipelineOptions, "not_ahead"), (TrackerOptions, "consumers"), (TrackerOptions, "fqns_to_skip"),
    (partial(SyncOptions, service="localhost:1", model="clicks"), "fqns_to_skip"),
])  # fmt: skip
def test_a_name_in_the_place_of_several_is_refused(options: Callable[..., Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 'abc', expected several names"):
        options(**{name: "abc"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_type_that_is_no_half_float_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidInput, match=f"amp_dtype: {dtype}, expected torch.bfloat16 or torch.float16"):
        PipelineOptions(amp_dtype=dtype)


@pytest.mark.parametrize("interval", [0, -1, 1.5, True])
def test_an_interval_is_a_whole_number_or_none(interval: Any) -> None:
    with pytest.raises(InvalidInput, match="dmp_collection_sync_interval_batches: "):
        PipelineOptions(dmp_collection_sync_interval_batches=interval)
    assert PipelineOptions(dmp_collection_sync_interval_batches=None)


def test_a_mode_that_is_only_its_name_is_refused() -> None:
    with pytest.raises(ValueError, match="mode: 'embedding', expected a TrackingMode"):
        TrackerOptions(mode="embedding")  # type: ignore[arg-type]
    assert TrackerOptions(mode=TrackingMode.EMBEDDING).mode is TrackingMode.EMBEDDING


FLOAT16 = {"enable_amp": True, "amp_dtype": torch.float16}


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
def test_what_follows_for_a_pipeline(options: dict[str, Any], scales_loss: bool, defers_tables: bool) -> None:
    chosen = PipelineOptions(**options)
    assert (chosen.scales_loss, chosen.defers_tables) == (scales_loss, defers_tables)


def test_what_was_published_is_printed_without_every_cut() -> None:
    stats = SyncStats()
    for step in range(1, 1001):
        stats.add(Position("h", step), Part(step=step, step_end_unix_ns=step, rows=[]), 0.5)
    assert str(stats).startswith("SyncStats(sealed=1000, published_step=1000, ")
    assert len(str(stats)) < 200
    assert len(stats.cuts) == 1000


@pytest.mark.parametrize(
    ("page", "options"),
    [
        ("trainer/README.md", SyncOptions),
        ("trainer/deltasync/trainer/tracking/README.md", TrackerOptions),
        ("trainer/deltasync/trainer/pipelines/README.md", PipelineOptions),
    ],
)
def test_the_readme_lists_the_options_and_their_defaults(page: str, options: type[Any]) -> None:
    table = document(page).text.partition(f"\n| `{options.__name__}` |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert {row[0].strip("| `"): row[1].strip("`") for row in rows} == {
        field.name: "\N{EN DASH}" if field.default is MISSING else str(field.default) for field in fields(options)
    }
