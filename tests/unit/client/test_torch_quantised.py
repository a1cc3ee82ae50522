"""Quantised tables in place: a TBE's bytes are those of quantising the trainer's model anew."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.quantised_model import (
    SIZES,
    TYPES,
    Model,
    deliveries_of,
    outputs,
    quantised,
    release_of,
    tbe_bytes,
    whole,
)
from torch import nn

from deltasync.client.torch_target import TorchTarget

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore::DeprecationWarning")


def assert_like_fresh(module: nn.Module, model: Model, bits: int = 8, alignment: int = 16) -> None:
    fresh = quantised(model, bits, alignment)
    assert tbe_bytes(module) == tbe_bytes(fresh)
    for found, expected in zip(outputs(module), outputs(fresh), strict=True):
        assert found.numpy().tobytes() == expected.numpy().tobytes()


ROWS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e-6, 1e-30, 500.0]) | st.floats(-100, 100, width=32)


@st.composite
def changes(draw: st.DrawFn, dim: int) -> list[tuple[dict[str, dict[int, list[float]]], set[str]]]:
    """Releases: by table and row, its values, where all zeros are a delete; and what is sent whole."""
    row = st.lists(ROWS, min_size=dim, max_size=dim) | st.just([0.0] * dim) | st.just([2.5] * dim)
    tables = {name: st.dictionaries(st.integers(0, SIZES[name] - 1), row, max_size=4) for name in ("user", "item")}
    return draw(
        st.lists(st.tuples(st.fixed_dictionaries(tables), st.sets(st.sampled_from(["user", "item"]))), max_size=4)
    )


@settings(max_examples=40)
@given(
    st.sampled_from([8, 4]),
    st.sampled_from([4, 8, 12, 16, 60]),
    st.sampled_from([1, 16]),
    st.booleans(),
    st.data(),
)
def test_any_releases_give_the_bytes_and_outputs_of_quantising_anew(
    bits: int, dim: int, alignment: int, sequences: bool, data: st.DataObject
) -> None:
    model = Model(dim, sequences=sequences)
    module = quantised(model, bits, alignment)
    target, value_type = TorchTarget(module), TYPES[bits][0]
    target.apply(whole(model, value_type))
    for number, (tables, reset) in enumerate(data.draw(changes(dim)), 2):
        with torch.no_grad():
            for name in reset:
                model.table(name).zero_()
            for name, rows in tables.items():
                for row, values in rows.items():
                    model.table(name)[row] = torch.tensor(values)
        changed = {name: np.array(sorted(rows), np.int64) for name, rows in tables.items()}
        specs = deliveries_of(model)
        names = frozenset(specs[name].spec.name for name in reset)
        target.apply(release_of(number, model, changed, value_type, whole=names))
        assert_like_fresh(module, model, bits, alignment)
