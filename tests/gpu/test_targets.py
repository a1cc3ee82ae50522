"""Targets whose modules are on a GPU: plain ones, of half precision, and quantised; paused, and in two copies."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.devices import CPU_AND_GPU, device_of, on_stream, stream_on
from torch import nn

from deltasync.client import Position, Release, RowBatch, TableKind, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType

READS = pytest.mark.parametrize("reads", ["pause", "copies"])
ROWS, DIM = 300, 8
HALVES = {ValueType.FP16: torch.float16, ValueType.BF16: torch.bfloat16}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(ROWS, DIM)
        self.over = nn.Linear(DIM, 2)
        self.count: torch.Tensor
        self.register_buffer("count", torch.tensor(2**40 + 1))


def release_of(number: int, model: Model, ids: Any, value_type: ValueType | None = None) -> Release:
    """Some rows of the table, and all of the rest: the first brings everything."""
    table = TableSpec("user", ROWS, DIM)
    form = TableForm(table, value_type, Mode.EMBEDDINGS) if value_type else TableForm.unchanged(table)
    values = form.held(form.encode(model.user.weight.detach().numpy()[ids]))
    rows = [RowBatch.of_table(form.replica_spec, np.asarray(ids), values)]
    for name, kind in (("over.weight", "parameter"), ("over.bias", "parameter"), ("count", "buffer")):
        array = model.state_dict()[name].numpy()
        array = array.reshape(1, -1) if array.ndim < 2 else array
        spec = TableSpec(name, len(array), array.shape[1], array.dtype, TableKind(kind))
        rows.append(RowBatch.of_table(spec, np.arange(len(array)), array))
    return Release(Position("h", number), number, 0, number == 1, [each.table for each in rows], rows)


def changed(model: Model) -> Model:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5).add_(0.1)
    other.count += 1
    return other


def proven(target: TorchTarget, release: Release, held: TargetChecksums) -> dict[str, int]:
    target.apply(release)
    return held.after(release)


def predicted(module: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        made: torch.Tensor = module.over(module.user(ids))
    return made


@CPU_AND_GPU
@READS
def test_a_module_holds_the_bits_that_were_sent(kind: str, reads: Reads) -> None:
    device, model = device_of(kind), Model().eval()
    target = TorchTarget(Model().eval().to(device), reads=reads)
    here = TorchTarget(Model().eval())
    there, proof = TargetChecksums(target), TargetChecksums(here)
    for number in range(1, 5):
        release = release_of(number, model, np.arange(ROWS) if number == 1 else np.arange(number, ROWS, 3))
        assert proven(target, release, there) == proven(here, release, proof)
        with target.reading() as reading, here.reading() as expected:
            found = reading.module.state_dict()
            assert {each.device.type for each in found.values()} == {kind}
            for name, tensor in expected.module.state_dict().items():
                assert torch.equal(found[name].cpu(), tensor), name
        model = changed(model)


@CPU_AND_GPU
@pytest.mark.parametrize("value_type", HALVES)
def test_half_precision(kind: str, value_type: ValueType) -> None:
    model, dtype = Model().eval(), HALVES[value_type]
    module = Model().eval().to(dtype).to(device_of(kind))
    TorchTarget(module).apply(release_of(1, model, np.arange(ROWS), value_type))
    for name in ("user.weight", "over.weight", "over.bias"):
        assert torch.equal(module.state_dict()[name].cpu(), model.state_dict()[name].to(dtype)), name


@CPU_AND_GPU
@READS
def test_readers_see_one_version_whatever_stream_they_are_on(kind: str, reads: Reads) -> None:
    device, versions = device_of(kind), 30
    target = TorchTarget(Model().eval().to(device), reads=reads)
    model = Model().eval()
    releases = []
    for number in range(1, versions + 1):
        with torch.no_grad():
            model.user.weight.fill_(number)
            model.over.weight.fill_(1 / DIM)
            model.over.bias.zero_()
        releases.append(release_of(number, model, np.arange(ROWS)))
    target.apply(releases[0])
    ids = torch.arange(ROWS, device=device).view(-1, 3)

    def read() -> None:
        stream = stream_on(device)
        with on_stream(stream):
            for _ in range(100):
                with target.reading() as reading:
                    scores = predicted(reading.module, ids)
                    if stream:
                        stream.synchronize()
                    assert set(scores.flatten().tolist()) == {reading.position.number}

    with ThreadPoolExecutor(2) as threads:
        reads_done = [threads.submit(read) for _ in range(2)]
        for release in releases[1:]:
            target.apply(release)
        for done in reads_done:
            done.result(120)


@CPU_AND_GPU
@READS
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sequences", [False, True], ids=["bags", "sequences"])
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore::DeprecationWarning")
def test_a_quantised_module_is_as_one_quantised_anew(kind: str, reads: Reads, bits: int, sequences: bool) -> None:
    pytest.importorskip("torchrec", reason="needs TorchRec")
    pytest.importorskip("fbgemm_gpu", reason="needs FBGEMM")
    from tests.support import quantised_model as support

    device, value_type = device_of(kind), support.TYPES[bits][0]
    model = support.Model(sequences=sequences)
    module = support.quantised(support.with_other_rows(model).to(device), bits)
    target = TorchTarget(module, reads=reads)
    target.apply(support.whole(model, value_type))
    for number in (2, 3):
        model = support.with_other_rows(model)
        rows = {name: np.arange(0, support.SIZES[name], 2) for name in ("user", "item")}
        target.apply(support.release_of(number, model, rows, value_type))
        rows = {name: np.arange(1, support.SIZES[name], 2) for name in ("user", "item")}
        target.apply(support.release_of(number, model, rows, value_type))
        fresh = support.quantised(model, bits)
        with target.reading() as reading:
            assert {tensor.device.type for tensor in support.tbe_memory_of(reading.module)} == {kind}
            assert rows_in(support.tbe_bytes(reading.module)) == rows_in(support.tbe_bytes(fresh))
            found, expected = support.outputs(reading.module, device), support.outputs(fresh)
        for name in ("user", "item"):
            torch.testing.assert_close(found[name].float().cpu(), expected[name].float(), rtol=1e-3, atol=1e-3)


def rows_in(held: dict[str, bytes]) -> dict[str, bytes]:
    """What was published: table "shop" stays as it is."""
    return {name: content for name, content in held.items() if name != "shop"}
