"""Embedding modules that take TensorDicts, on one process, unsharded."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import fx, nn
from torchrec.fx import Tracer
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import accept_tensordicts

IDS = {"f": [[1, 2], [3], []], "g": [[], [4], [5, 6, 7]]}
ROWS, DIM = 8, 4


def flat(examples: list[list[int]]) -> torch.Tensor:
    return torch.tensor([one for example in examples for one in example])


def lengths(examples: list[list[int]]) -> torch.Tensor:
    return torch.tensor([len(example) for example in examples])


def kjt(*keys: str, weighted: bool = False) -> KeyedJaggedTensor:
    values = torch.cat([flat(IDS[key]) for key in keys])
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        lengths=torch.cat([lengths(IDS[key]) for key in keys]),
        weights=values * 0.5 if weighted else None,
    )


def tensordict(*keys: str, weighted: bool = False, **extra: Any) -> TensorDict:
    of_key = {
        key: JaggedTensor(
            flat(IDS[key]), lengths=lengths(IDS[key]), weights=flat(IDS[key]) * 0.5 if weighted else None
        )
        for key in keys
    }
    return TensorDict(of_key | extra)


def nested(*keys: str) -> TensorDict:
    offsets = {key: torch.cat([torch.zeros(1, dtype=torch.int64), lengths(IDS[key]).cumsum(0)]) for key in keys}
    return TensorDict({key: torch.nested.nested_tensor_from_jagged(flat(IDS[key]), offsets[key]) for key in keys})


def bag_configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="one", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f", "g"]),
        EmbeddingBagConfig(name="two", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["g"]),
    ]


def bags(*, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=bag_configs(), is_weighted=weighted)


def sequences() -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name="one", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f", "g"]),
        EmbeddingConfig(name="two", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["g"]),
    ]
    return EmbeddingCollection(tables=configs)


def fused_bags(*, weighted: bool = False) -> nn.Module:
    sgd: dict[str, Any] = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    module: nn.Module = FusedEmbeddingBagCollection(tables=bag_configs(), is_weighted=weighted, **sgd)
    return module


def found(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return torch.cat([output[key].values() for key in sorted(output)])
    pooled: torch.Tensor = output.values()
    return pooled


KINDS: dict[str, Callable[[], nn.Module]] = {"bags": bags, "sequences": sequences}
every_kind = pytest.mark.parametrize("make", [*KINDS.values(), fused_bags], ids=[*KINDS, "fused bags"])


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def module(request: pytest.FixtureRequest) -> nn.Module:
    made: nn.Module = request.param()
    return made


@every_kind
def test_the_same_is_found_in_any_order_of_keys_with_others_beside_them(make: Callable[[], nn.Module]) -> None:
    module = make()
    expected = found(module(kjt("f", "g")))
    accept_tensordicts(module)
    for keys in ("fg", "gf"):
        assert torch.equal(found(module(tensordict(*keys, text="text", dense=torch.ones(3)))), expected)
        assert torch.equal(found(module(nested(*keys))), expected)
    assert torch.equal(found(module(kjt("g", "f"))), expected)
    assert torch.equal(found(module(features=tensordict("g", "f", text="text"))), expected)


@pytest.mark.parametrize("make", [bags, fused_bags])
def test_weights_of_ids(make: Callable[..., nn.Module]) -> None:
    weighting = make(weighted=True)
    expected = found(weighting(kjt("f", "g", weighted=True)))
    assert not torch.equal(expected, found(make(weighted=False)(kjt("f", "g"))))
    accept_tensordicts(weighting)
    assert torch.equal(found(weighting(tensordict("g", "f", weighted=True))), expected)
    with pytest.raises(InvalidInput, match=r"key 'f' .* without weights"):
        weighting(tensordict("g", "f"))


@pytest.mark.parametrize("make", [bags, fused_bags])
def test_bags_that_do_not_weight_refuse_weights(make: Callable[[], nn.Module]) -> None:
    """TorchRec's unsharded bags would not look at them, its sharded ones would."""
    plain = make()
    accept_tensordicts(plain)
    with pytest.raises(InvalidInput, match=r"key 'f' .* weights"):
        plain(tensordict("f", "g", weighted=True))


def test_sequences_leave_weights_alone() -> None:
    module = sequences()
    expected = found(module(kjt("f", "g", weighted=True)))
    accept_tensordicts(module)
    assert torch.equal(found(module(tensordict("f", "g", weighted=True))), expected)


def test_accepting_twice_is_accepting_once(module: nn.Module) -> None:
    accept_tensordicts(module)
    accept_tensordicts(nn.Sequential(module))
    assert len(module._forward_pre_hooks) == 1


def _pickled(module: nn.Module) -> nn.Module:
    again: nn.Module = pickle.loads(pickle.dumps(module))  # noqa: S301  # It has just been made.
    return again


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_copies_take_tensordicts_too(module: nn.Module, copied: Callable[[nn.Module], nn.Module]) -> None:
    accept_tensordicts(module)
    expected = found(module(tensordict("f", "g")))
    again = copied(module)
    assert torch.equal(found(again(tensordict("g", "f"))), expected)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(found(again(tensordict("g", "f"))), expected)  # It looks up in its own tables.


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        return self.inner(batch["sparse"])


def test_a_traced_model_takes_them(module: nn.Module) -> None:
    outer = Outer(module)
    accept_tensordicts(outer)
    traced = fx.GraphModule(outer, Tracer(leaf_modules=[type(module).__name__]).trace(outer))
    expected = found(outer({"sparse": kjt("f", "g")}))
    for features in (kjt("g", "f"), tensordict("g", "f")):
        assert torch.equal(found(traced(TensorDict({"sparse": features}))), expected)


@every_kind
def test_a_tensorclass_is_refused(make: Callable[[], nn.Module]) -> None:
    @tensorclass
    class Examples:
        f: JaggedTensor
        g: JaggedTensor

    module = make()
    accept_tensordicts(module)
    with pytest.raises(InvalidInput, match="Examples"):
        module(Examples(**tensordict("f", "g").to_dict()))


def _processed() -> nn.Module:
    processors = {name: PositionWeightedModule(max_feature_length=8) for name in ("f", "g")}
    module: nn.Module = FeatureProcessedEmbeddingBagCollection(bags(weighted=True), processors)
    return module


def _collided() -> nn.Module:
    remappings = {
        config.name: MCHManagedCollisionModule(
            zch_size=ROWS,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=1000,
        )
        for config in bag_configs()[:1]
    }
    configs = bag_configs()[:1]
    collisions = ManagedCollisionCollection(remappings, configs)
    module: nn.Module = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs), collisions)
    return module


@pytest.mark.parametrize("make", [_processed, _collided], ids=["processed", "collided"])
def test_modules_that_do_more_than_looking_up_refuse_tensordicts(make: Callable[[], nn.Module]) -> None:
    module = make().eval()
    before = module(kjt("f", "g"))
    accept_tensordicts(module)
    with pytest.raises(InvalidInput, match=f"{type(module).__name__} takes no TensorDict"):
        module(tensordict("f", "g"))
    after = module(kjt("f", "g"))
    first, second = (one[0] if isinstance(one, tuple) else one for one in (before, after))
    assert torch.equal(first.values(), second.values())
