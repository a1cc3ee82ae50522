"""Torch modules serve from shared memory without a copy."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tests.support.shared_memory import attached, header, mirror
from tests.support.shared_memory import release_of as values_of
from tests.support.waiting import wait_for
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.client import Position, Release, RowBatch, SharedReader, SharedTarget, TableKind, TableSpec
from deltasync.client.shared.reader import SharedReading
from deltasync.client.shared.torch_module import SharedModule, tensors

USER = TableSpec("sparse.embedding_bags.user", 5, 4)
BIAS = TableSpec("over.bias", 1, 4, kind=TableKind.PARAMETER, sizes=(4,))


class Model(torch.nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="user", num_embeddings=5, embedding_dim=4, feature_names=["f"])
        self.sparse = EmbeddingBagCollection(tables=[config])
        self.over = torch.nn.Linear(4, 4)
        self.to(dtype)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        values: torch.Tensor = self.over(self.sparse(features).values())
        return values


def filled(folder: Path, model: Model) -> SharedTarget:
    target = mirror(folder)
    target.apply(release_of(model, 1))
    return target


def release_of(model: Model, number: int) -> Release:
    user = model.sparse.embedding_bags["user"].weight.detach().numpy()
    bias = model.over.bias.detach().numpy()[None]
    return Release(
        position=Position("h", number, number),
        step=number,
        step_end_unix_ns=number,
        resync=number == 1,
        tables=[USER, BIAS],
        rows=[RowBatch.of_table(USER, np.arange(5), user), RowBatch.of_table(BIAS, [0], bias)],
        version=number,
        model="clicks",
    )


def test_a_collection_answers_from_the_shared_memory(folder: Path) -> None:
    trained, serving = Model(), Model()
    with torch.no_grad():
        serving.over.weight.copy_(trained.over.weight)
    target, reader = filled(folder, trained), attached(folder)
    seen = list[int]()
    serving.register_forward_hook(lambda module, *_: seen.append(module.over.bias.data_ptr()))
    shared = SharedModule(serving, leave_out=["over.weight"])
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 3, 4, 4]), lengths=torch.tensor([2, 0, 2]))
    for number in (2, 2, 3, 4):  # Number 2 comes twice: a repair has the position of the release that it repairs.
        with torch.no_grad():
            trained.over.bias.normal_()
        target.apply(release_of(trained, number))
        with reader.reading() as now, torch.inference_mode():
            assert torch.equal(shared(now, features), trained(features))
            assert seen[-1] == now.tables[BIAS.name].ctypes.data, "nothing was copied"
            assert tensors(now)[USER.name].data_ptr() == now.tables[USER.name].ctypes.data
    target.close()


def test_a_module_of_another_type_needs_a_copy(folder: Path) -> None:
    target, reader = filled(folder, Model()), attached(folder)
    with (
        reader.reading() as now,
        pytest.raises(Contradiction, match=r"has type torch.float32, and the module needs a copy of it"),
    ):
        SharedModule(Model(torch.float64))(now)
    target.close()


FIRST, SECOND = (TableSpec(f"{name}.weight", 3, 2, kind=TableKind.PARAMETER) for name in ("first", "second"))


class Pair(nn.Module):
    """Looks rows up in two tables, and calls a function in between."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(3, 2), nn.Embedding(3, 2)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.between = between

    def forward(self, ids: torch.Tensor) -> set[float]:
        before = self.first(ids).flatten().tolist()
        self.between()
        return {*before, *(self.second(ids) * self.scale).flatten().tolist()}


def pair_of(version: int, *tables: TableSpec) -> Release:
    return values_of(version, *(tables or (FIRST, SECOND)))


def mirrored(folder: Path) -> tuple[SharedTarget, SharedReader]:
    return mirror(folder), attached(folder)


IDS = torch.tensor([0, 2])


def test_concurrent_calls_of_a_module_each_use_their_own_version(folder: Path) -> None:
    target, reader = mirrored(folder)
    target.apply(pair_of(1))
    names = ("first", "same side", "other side")
    inside, goes_on = ({name: threading.Event() for name in names} for _ in range(2))
    found = dict[str, set[float]]()

    def wait() -> None:
        name = threading.current_thread().name
        inside[name].set()
        assert goes_on[name].wait(30)

    shared = SharedModule(Pair(wait))

    def call() -> None:
        with reader.reading() as now, torch.inference_mode():
            found[threading.current_thread().name] = shared(now, IDS)

    applying = threading.Thread(target=target.apply, args=(pair_of(2),))  # It waits for the calls before it ends.
    calls = {name: threading.Thread(target=call, name=name) for name in names}
    for name, each in calls.items():
        if name == "other side":
            applying.start()
            wait_for(lambda: reader.version().version == 2)
        each.start()
        assert inside[name].wait(30)
    for name, each in calls.items():
        goes_on[name].set()
        each.join(30)
    applying.join(30)
    assert found == {"first": {1.0}, "same side": {1.0}, "other side": {2.0}}
    target.close()


class Interrupted:
    """A version in shared memory. Before its tables are read, something else happens."""

    def __init__(self, reading: SharedReading, before: Callable[[], object]) -> None:
        self._reading, self._before = reading, before

    def __getattr__(self, name: str) -> object:
        if name == "tables":
            self._before()
        return getattr(self._reading, name)


def test_a_call_goes_on_while_other_threads_bind_other_memory(folder: Path) -> None:
    target, reader = mirrored(folder)
    target.apply(pair_of(1))
    shared = SharedModule(Pair())

    def call() -> None:
        with attached(folder).reading() as now, torch.inference_mode():
            shared(now, IDS)

    def call_in_a_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    call()
    with reader.reading() as now, torch.inference_mode():
        assert shared(cast("SharedReading", Interrupted(now, call_in_a_thread)), IDS) == {1.0}
    target.close()


def test_what_the_mirror_lacks_is_an_error_unless_it_is_left_out(folder: Path) -> None:
    target, reader = mirrored(folder)
    target.apply(pair_of(1))
    module, shared = Pair(), SharedModule(Pair())
    nn.init.constant_(module.second.weight, 7.0)
    partial = SharedModule(module, leave_out=["second.*"])
    with reader.reading() as now, torch.inference_mode():
        assert shared(now, IDS) == {1.0}
        assert partial(now, IDS) == {1.0, 7.0}, "what is left out keeps its values, although the mirror has them"
    target.apply(pair_of(2, FIRST))
    with reader.reading() as now, torch.inference_mode():
        with pytest.raises(NotFound, match=r"the mirror has no table for second\.weight: .*leave_out"):
            shared(now, IDS)
        assert partial(now, IDS) == {2.0, 7.0}
    with pytest.raises(InvalidInput, match=r"expected a list of patterns, \['second.\*'\]"):
        SharedModule(module, leave_out="second.*")
    target.close()


def test_a_module_on_the_meta_device_needs_values_from_the_mirror(folder: Path) -> None:
    target, reader = mirrored(folder)
    target.apply(pair_of(1))
    with torch.device("meta"):
        module = Pair()
    with pytest.raises(Contradiction, match="scale is on the meta device"):
        SharedModule(module)
    module.scale = torch.ones(1)
    with pytest.raises(Contradiction, match=r"second\.weight is on the meta device"):
        SharedModule(module, leave_out=["second.*"])
    with reader.reading() as now, torch.inference_mode():
        assert SharedModule(module)(now, IDS) == {1.0}
    target.close()


def test_readiness_includes_whether_the_module_can_use_the_tables(folder: Path) -> None:
    target, reader = mirrored(folder)
    target.apply(pair_of(1))
    shared = SharedModule(Pair())
    assert shared.readiness(reader) == Decision(False, "its mirror has just started")
    target.note_readiness(Decision(True, "it has caught up"))
    assert shared.readiness(reader) == Decision(True, "it has caught up")
    half = TableSpec(FIRST.name, FIRST.rows, FIRST.dim, np.dtype("<f2"), FIRST.kind)
    target.apply(pair_of(2, half, SECOND))
    assert reader.readiness.yes
    assert not shared.readiness(reader).yes
    assert "'first.weight' has type torch.float16, and the module needs a copy" in shared.readiness(reader).reason
    target.apply(pair_of(3, SECOND))
    assert "no table for first.weight" in shared.readiness(reader).reason
    target.apply(pair_of(4))
    assert shared.readiness(reader).yes
    header(folder)["alive_ns"] = 0
    assert shared.readiness(reader) == Decision(False, "its mirror has stopped")
    target.close()


def traced(module: nn.Module) -> nn.Module:
    made: nn.Module = torch.jit.trace(module, IDS)  # type: ignore[no-untyped-call]
    return made


class Lockable:
    """Cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def wait(self) -> None:
        with self.lock:
            pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", [traced, torch.jit.script])
def test_scripted_and_traced_modules_are_refused(made: Callable[[nn.Module], nn.Module]) -> None:
    for module in (made(nn.Embedding(3, 2)), nn.Sequential(made(nn.Embedding(3, 2)))):
        with pytest.raises(Contradiction, match="is scripted, traced or compiled ahead of time"):
            SharedModule(module)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = Pair()
    module.between = Lockable().wait
    with pytest.raises(Contradiction, match=r"the module cannot be copied: TypeError: cannot pickle"):
        SharedModule(module)


def test_modules_of_many_kinds_answer_from_the_memory(folder: Path) -> None:
    tied, recurrent = Pair(), nn.LSTM(2, 2)
    tied.second.weight = tied.first.weight
    target, reader = mirrored(folder)
    tables = [TableSpec(FIRST.name, 3, 2, kind=TableKind.PARAMETER, aliases=(SECOND.name,))]
    for name, each in recurrent.named_parameters():
        rows, dim = each.shape if each.ndim == 2 else (1, len(each))
        tables.append(TableSpec(name, rows, dim, kind=TableKind.PARAMETER))
    target.apply(pair_of(1, *tables))
    expected = copy.deepcopy(recurrent)
    for each in expected.parameters():
        nn.init.constant_(each, 1.0)
    steps = torch.randn(4, 1, 2)
    with reader.reading() as now, torch.inference_mode():
        assert SharedModule(tied)(now, IDS) == {1.0}
        assert torch.equal(SharedModule(recurrent)(now, steps)[0], expected(steps)[0])
    target.close()
