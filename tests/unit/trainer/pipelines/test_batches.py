"""Batches on their way to a device, with `meta` for one, and streams that stand in for those of a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines.batches import hand_over, record_stream, tensors_in, to_device

CPU, META = torch.device("cpu"), torch.device("meta")


def jagged(*ids: int) -> JaggedTensor:
    return JaggedTensor(torch.tensor(ids), lengths=torch.tensor([1] * len(ids)), weights=torch.ones(len(ids)))


def nested(*rows: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def keyed() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


def batch() -> TensorDict:
    return TensorDict(
        {
            "jagged": jagged(1, 2),
            "nested": nested([1], [2, 3]),
            "dense": torch.ones(2),
            "text": "text",
            "sparse": TensorDict({"jagged": jagged(3, 4), "deeper": TensorDict({"jagged": jagged(5, 6)})}),
        }
    )


def devices(value: Any) -> set[str]:
    return {tensor.device.type for _, tensor in tensors_in(value)}


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]  # torchrec's types are not followed
    sparse: TensorDict

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        return Batch(to_device(self.sparse, device))

    def record_stream(self, stream: torch.Stream) -> None:
        record_stream(self.sparse, stream)


# To a device.


def test_a_copy_of_a_tensordict_is_complete_and_leaves_the_original_alone() -> None:
    given = batch()
    before = dict(tensors_in(given))
    copied = to_device(given, META)
    assert devices(copied) == {"meta"}
    assert [path for path, _ in tensors_in(copied)] == list(before)
    assert copied["text"] == "text"
    after = dict(tensors_in(given))
    assert after.keys() == before.keys()
    assert all(after[path] is tensor for path, tensor in before.items()), "found again as the same"
    assert devices(given) == {"cpu"}


def test_a_tensordict_that_is_on_its_device_keeps_its_values() -> None:
    for device in (None, CPU):
        given = batch().to(device) if device else batch()
        copied = to_device(given, CPU)
        assert copied["jagged"].values().tolist() == [1, 2]
        assert copied["sparse"]["deeper"]["jagged"].weights().tolist() == [1, 1]
        assert copied["nested"]._values.tolist() == [1, 2, 3]


@pytest.mark.parametrize("device", [CPU, META])
def test_a_locked_tensordict_is_copied(device: torch.device) -> None:
    locked = batch().lock_()
    copied = to_device(locked, device)
    assert devices(copied) == {device.type}
    assert locked.is_locked


@tensorclass
class Examples:
    jagged: JaggedTensor
    dense: torch.Tensor


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        jagged(1),
        keyed(),
        TensorDict({"sparse": keyed(), "more": TensorDict({"sparse": keyed()})}),
        TensorDict({"examples": Examples(jagged=jagged(1, 2), dense=torch.ones(2))}),
    ],
    ids=["tensor", "jagged", "keyed", "keyed in a tensordict", "tensorclass in a tensordict"],
)
def test_batches_of_other_types_are_copied(value: Any) -> None:
    copied = to_device(value, META)
    assert devices(copied) == {"meta"}
    assert type(copied) is type(value)


def test_pipelineables_are_copied() -> None:
    assert devices(to_device(Batch(batch()), META).sparse) == {"meta"}
    assert devices(to_device(TensorDict({"inner": Batch(batch())}), META)["inner"].sparse) == {"meta"}


def test_a_lazy_stack_is_copied() -> None:
    stack = lazy_stack([TensorDict({"f": torch.ones(2)}), TensorDict({"f": torch.zeros(2)})])
    copied = to_device(stack, META)
    assert (copied.device, copied["f"].device, copied["f"].shape) == (META, META, (2, 2))


@pytest.mark.parametrize("batch", [(torch.ones(1),), {"f": torch.ones(1)}, None])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(InvalidInput, match=f"a batch is a {type(batch).__name__}, expected a TensorDict"):
        to_device(batch, CPU)


# Streams.


@pytest.fixture
def recorded() -> Iterator[list[tuple[int, Any]]]:
    """Which tensors' memory has been kept, for which streams."""
    found: list[tuple[int, Any]] = []

    def record(tensor: torch.Tensor, stream: Any) -> None:
        found.append((tensor.data_ptr(), stream))

    with mock.patch.object(torch.Tensor, "record_stream", record):
        yield found


def stream(device: torch.device = CPU) -> Any:
    return mock.Mock(device=device)


def memory(*tensors: torch.Tensor) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def test_all_memory_of_a_tensordict_is_kept(recorded: list[tuple[int, Any]]) -> None:
    given, on = batch(), stream()
    record_stream(given, on)
    tensors = [given["dense"], given["nested"]._values, given["nested"]._offsets]
    for one in (given["jagged"], given["sparse"]["jagged"], given["sparse"]["deeper"]["jagged"]):
        tensors += [one.values(), one.lengths(), one.weights()]
    assert {pointer for pointer, _ in recorded} == memory(*tensors)
    assert all(used is on for _, used in recorded)


def test_memory_of_what_is_in_containers_is_kept(recorded: list[tuple[int, Any]]) -> None:
    first, second, third, kjt = torch.ones(1), torch.ones(1), torch.ones(1), keyed()
    within = TensorDict({"b": third, "sparse": kjt})
    record_stream([first, {"a": (second, "text", None)}, SimpleNamespace(), within], stream())
    assert {pointer for pointer, _ in recorded} == memory(first, second, third, kjt.values(), kjt.lengths())


def test_what_is_on_another_kind_of_device_is_not_kept(recorded: list[tuple[int, Any]]) -> None:
    dense = torch.ones(1)
    record_stream(TensorDict({"here": dense, "there": torch.ones(1, device="meta")}), stream())
    assert {pointer for pointer, _ in recorded} == memory(dense)
    record_stream(batch(), stream(torch.device("cuda")))
    assert {pointer for pointer, _ in recorded} == memory(dense)


def test_a_batch_that_knows_how_keeps_itself() -> None:
    given, on = mock.Mock(spec=Batch), stream()
    record_stream(given, on)
    given.record_stream.assert_called_once_with(on)


def test_the_current_stream_waits_for_a_value_and_keeps_its_memory() -> None:
    current, before, steps = stream(), stream(), []
    current.wait_stream.side_effect = lambda other: steps.append(("waits", other))
    given = mock.Mock(spec=Batch)
    given.record_stream.side_effect = lambda on: steps.append(("kept", on))
    device_module = mock.Mock(**{"current_stream.return_value": current})
    with mock.patch.object(torch, "get_device_module", return_value=device_module) as found:
        hand_over(given, before)
    found.assert_called_once_with(before.device)
    assert steps == [("waits", before), ("kept", current)]


def test_without_streams_nothing_is_handed_over() -> None:
    given = mock.Mock(spec=Batch)
    hand_over(given, None)
    given.record_stream.assert_not_called()


# What is in a batch.


def test_tensors_are_found_with_where_they_are() -> None:
    dense, ids = torch.ones(1), jagged(1)
    found = dict(tensors_in(TensorDict({"dense": dense, "in": TensorDict({"ids": ids}), "text": "text"})))
    assert found.keys() == {
        ("dense",),
        ("in", "ids", "_values"),
        ("in", "ids", "_lengths"),
        ("in", "ids", "_weights"),
    }
    assert found["dense",] is dense
    assert found["in", "ids", "_values"] is ids.values()
