"""Quantised modules serve from shared memory without a copy, as if they were quantised anew."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.quantised_model import (
    TYPES,
    Model,
    by_table,
    each_row,
    on_cpu,
    outputs,
    quantised,
    sharded,
    tbes_of,
    whole,
    with_other_rows,
)
from tests.support.shared_memory import attached, mirror
from torch import nn
from torchrec import KeyedJaggedTensor

from deltasync.base.errors import Contradiction, NotFound
from deltasync.client import Position, SharedReader, SharedTarget
from deltasync.client.shared.torch_module import SharedModule

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore::DeprecationWarning")


class Whole(nn.Module):
    """A model whose forward looks rows up in its only collection."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sparse = model.get_submodule("sparse")

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.sparse(features)


@pytest.mark.parametrize("sequences", [False, True], ids=["bags", "sequences"])
@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_collection_answers_from_the_memory(
    folder: Path, bits: int, alignment: int, sequences: bool
) -> None:
    trained = Model(sequences=sequences)
    module = Whole(quantised(with_other_rows(trained), bits, alignment))
    seen = list[nn.Module]()
    module.register_forward_hook(lambda called, *_: seen.append(called))
    shared = SharedModule(module, leave_out=["*.shop.*"])
    target, reader = mirror(folder), attached(folder)
    for version in (1, 2, 3):  # The sides take turns.
        trained = with_other_rows(trained)
        target.apply(replace(whole(trained, TYPES[bits][0]), version=version, model="clicks"))
        with reader.reading() as now, torch.inference_mode():
            found = by_table(shared(now, each_row()))
            (tbe,) = tbes_of(seen[-1])
            views = [each[0].data_ptr() for each in tbe.split_embedding_weights_with_scale_bias(0)]
            assert set(views[:2]) == {each.ctypes.data for each in now.tables.values()}, "nothing was copied"
            weights = [each for name, each in seen[-1].named_buffers() if name.endswith(".weight")]
            assert not any(each.numel() for each in weights), "the module's first memory can be freed"
        expected = outputs(quantised(trained, bits, alignment))
        assert found.keys() == expected.keys()
        for name, rows in expected.items():
            assert torch.equal(found[name], rows), name
    target.close()


def test_a_collection_sharded_by_row_answers_from_the_memory(folder: Path) -> None:
    trained = Model()
    with on_cpu():
        module = Whole(sharded(quantised(with_other_rows(trained)), "row_wise"))
        shared = SharedModule(module, leave_out=["*.shop.*"])
        target, reader = mirror(folder), attached(folder)
        target.apply(replace(whole(trained), version=1, model="clicks"))
        with reader.reading() as now, torch.inference_mode():
            found = by_table(shared(now, each_row()))
    expected = outputs(quantised(trained))
    for name in ("user", "item"):  # Sharding has set the rows of the third table to zeros.
        assert torch.equal(found[name], expected[name]), name
    target.close()


def test_what_cannot_serve_from_the_memory_is_refused(folder: Path) -> None:
    reversed_rows = quantised(Model())
    for tbe in tbes_of(reversed_rows):
        tbe.reverse_qparam = True
    target, reader = mirror(folder), attached(folder)
    target.apply(replace(whole(Model()), version=1, model="clicks"))
    with reader.reading() as now:
        with pytest.raises(Contradiction, match="has scale and bias at the end of its rows"):
            SharedModule(reversed_rows)(now)
        with pytest.raises(Contradiction, match="set value_type int4-tbe in the consumer's policy"):
            SharedModule(quantised(Model(), 4))(now)
    target.close()


def test_modules_of_two_mirrors_may_share_their_tables(folder: Path) -> None:
    module = Whole(quantised(Model()))
    shared = [SharedModule(module, leave_out=["*.shop.*"]) for _ in "ab"]
    models = [with_other_rows(Model()), with_other_rows(Model())]
    targets = [SharedTarget(name, "predictors", directory=folder) for name in "ab"]
    for target, model in zip(targets, models, strict=True):
        target.apply(replace(whole(model), version=1, model="clicks"))
    readers = [SharedReader(name, directory=folder) for name in "ab"]
    for number in (0, 1, 0):
        with readers[number].reading() as now, torch.inference_mode():
            found = by_table(shared[number](now, each_row()))
        expected = outputs(quantised(models[number]))
        assert all(torch.equal(found[name], expected[name]) for name in ("user", "item"))
    for target in targets:
        target.close()


def test_a_table_that_leaves_the_mirror_cannot_be_used_any_more(folder: Path) -> None:
    model, module = Model(), Whole(quantised(Model()))
    shared = SharedModule(module, leave_out=["*.shop.*"])
    first = replace(whole(model), version=1, model="clicks")
    target, reader = mirror(folder), attached(folder)
    target.apply(first)
    with reader.reading() as now, torch.inference_mode():
        shared(now, each_row())
    tables, rows = first.tables[:1], [each for each in first.rows if each.table.name == first.tables[0].name]
    target.apply(replace(first, position=Position("h", 2, 2), version=2, tables=tables, rows=rows))
    with (
        reader.reading() as now,
        pytest.raises(NotFound, match=r"the mirror has no table for sparse\.embedding_bags\.item\.weight"),
    ):
        shared(now, each_row())
    target.close()
