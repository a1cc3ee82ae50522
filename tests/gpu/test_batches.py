"""Batches on their way to a GPU, and random numbers there."""

import pytest
import torch
from tests.support.devices import CPU_AND_GPU, device_of, needs, on_stream, stream_on

needs("deltasync.trainer.pipelines", "tests.bench.pipelines.batches")

from tests.bench.pipelines.batches import BatchKind, draw
from tests.bench.pipelines.options import Sizes

from deltasync.trainer.pipelines.batches import hand_over, record_stream, tensors_in, to_device
from deltasync.trainer.pipelines.plan import random_states, random_states_preserved
from deltasync.trainer.pipelines.tensordicts import to_kjt

SIZES = Sizes(ranks=1, batch_size=4, tables=2, rows=9, dim=4, ids=2, dense=2, over=4)


@CPU_AND_GPU
@pytest.mark.parametrize("batches", BatchKind)
def test_a_batch_arrives_as_it_was(kind: str, batches: BatchKind) -> None:
    device = device_of(kind)
    batch = draw(SIZES, 0, device)[0].of_kind(batches)
    stream = stream_on(device)
    with on_stream(stream):
        arrived = to_device(batch, device)
    hand_over(arrived, stream)
    before, after = tensors_in(batch), tensors_in(arrived)
    assert [path for path, _ in after] == [path for path, _ in before]
    for (_, ours), (_, theirs) in zip(after, before, strict=True):
        assert ours.device.type == kind
        assert torch.equal(ours.cpu(), theirs)
    if stream:
        record_stream(arrived, stream)


@CPU_AND_GPU
def test_features_of_a_tensordict_are_those_of_the_keyed_jagged_tensor(kind: str) -> None:
    device, examples = device_of(kind), draw(SIZES, 0, device_of(kind))[0]
    expected = examples.batch().sparse
    found = to_kjt(to_device(examples.tensordict(), device), examples.keys)
    assert (found.keys(), found.length_per_key()) == (expected.keys(), expected.length_per_key())
    assert torch.equal(found.values().cpu(), expected.values())
    assert torch.equal(found.lengths().cpu().long(), expected.lengths().long())


@pytest.mark.gpu
def test_batches_are_copied_from_page_locked_memory() -> None:
    assert all(tensor.is_pinned() for _, tensor in tensors_in(draw(SIZES, 0, device_of("cuda"))[0].batch()))


@CPU_AND_GPU
def test_what_is_drawn_while_trying_is_drawn_again(kind: str) -> None:
    device, before = device_of(kind), random_states()
    with random_states_preserved():
        first = torch.rand(3, device=device)
    assert random_states() == before
    assert torch.equal(torch.rand(3, device=device), first)
    assert random_states() != before
