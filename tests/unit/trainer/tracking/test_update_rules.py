"""What is decided for each optimizer and setting of TorchRec and FBGEMM, and that the README says so."""

import dataclasses
import inspect
import re
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from fbgemm_gpu.tbe.config.optimizer_config import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    LearningRateMode,
    TailIdThreshold,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from tests.support.documents import ROOT
from torchrec.distributed import batched_embedding_kernel, embedding_sharding, fused_params
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import CacheParams, ParameterSharding
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking.update_rules import (
    FOLLOWED_KERNELS,
    OPTIMIZERS,
    REFUSED_FLAGS,
    ROUNDING_CACHE,
    WEIGHT_DECAYS,
    Marking,
    check_tracked,
    rule_of,
    update_rule,
)

README = (ROOT / "trainer/deltasync/trainer/tracking/README.md").read_text()
ROWWISE = EmbOptimType.EXACT_ROWWISE_ADAGRAD
ROWS = 16
COUNTER = CounterBasedRegularizationDefinition(
    counter_weight_decay_mode=CounterWeightDecayMode.L2,
    counter_halflife=10,
    max_counter_update_freq=2,
    learning_rate_mode=LearningRateMode.TAIL_ID_LR_DECREASE,
    tail_id_threshold=TailIdThreshold(0.5, True),
)
ADAGRAD_W = CounterBasedRegularizationDefinition(
    counter_weight_decay_mode=CounterWeightDecayMode.ADAGRADW, counter_halflife=10
)
ON_A_CPU: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "row-wise adagrad": {},
    "L2": {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
    "decoupled": {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.DECOUPLE},
    "counter": {"weight_decay_mode": WeightDecayMode.COUNTER, "counter_based_regularization": COUNTER},
    "adagradw": {"weight_decay_mode": WeightDecayMode.COUNTER, "counter_based_regularization": ADAGRAD_W},
    "cowclip": {
        "weight_decay_mode": WeightDecayMode.COWCLIP,
        "cowclip_regularization": CowClipDefinition(weight_norm_coefficient=1.0),
    },
    "norms": {"max_norm": 0.01},
    "clipped": {"gradient_clipping": True, "max_gradient": 0.01},
    "half": {"weights_precision": SparseType.FP16, "stochastic_rounding": True},
}


@pytest.mark.parametrize("settings", ON_A_CPU.values(), ids=ON_A_CPU)
def test_what_is_called_exact_changes_the_rows_of_a_batch_alone(settings: dict[str, Any]) -> None:
    chosen = {"optimizer": ROWWISE, "learning_rate": 0.1, "weight_decay": 0.1} | settings
    specs = [(ROWS, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    kernel = SplitTableBatchedEmbeddingBagsCodegen(specs, **chosen)
    kernel.init_embedding_weights_uniform(-1, 1)
    assert rule_of(SimpleNamespace(emb_module=kernel)).marking is Marking.EXACT
    changed: set[int] = set()
    for step in range(12):
        before = kernel.split_embedding_weights()[0].clone()
        kernel(torch.tensor([step % 2, 5]), torch.tensor([0, 1, 2])).float().sum().backward()
        now = torch.nonzero((before != kernel.split_embedding_weights()[0]).any(dim=1)).view(-1).tolist()
        assert set(now) <= {step % 2, 5}
        changed.update(now)
    assert changed == {0, 1, 5}


def test_every_optimizer_and_every_weight_decay_is_decided() -> None:
    assert OPTIMIZERS.keys() == set(EmbOptimType)
    assert WEIGHT_DECAYS.keys() == set(WeightDecayMode)


def test_the_readme_has_them_all_as_they_are_decided() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    decided = {one.name: rule for one, rule in OPTIMIZERS.items()}
    decided |= {f"WeightDecayMode.{one.name}": rule for one, rule in WEIGHT_DECAYS.items()}
    for name, rule in decided.items():
        [row] = [line for line in rows if f"`{name}`" in line.split("|")[1]]
        assert row.split("|")[2].strip() == rule.marking.value, row


def fields_of(of: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(of)}


def parameters_of_kernels() -> set[str]:
    """What `fused_params` may hold: what FBGEMM's kernels take, and what TorchRec takes out before."""
    kernels = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters.keys() - {"self"}
    named = re.compile(r"FUSED_PARAM_.*|.*_STR|USE_ONE_TBE_PER_TABLE")
    modules = (fused_params, batched_embedding_kernel, embedding_sharding)
    constants = {key: value for module in modules for key, value in vars(module).items() if named.fullmatch(key)}
    return kernels | set(constants.values())


@pytest.mark.parametrize(
    ("of", "installed"),
    [
        ("EmbeddingBagConfig", fields_of(EmbeddingBagConfig) | fields_of(EmbeddingConfig)),
        ("EmbeddingComputeKernel", {kernel.value for kernel in EmbeddingComputeKernel}),
        ("ParameterSharding", fields_of(ParameterSharding)),
        ("CacheParams", fields_of(CacheParams)),
        ("UserEnabledConfigDefinition", fields_of(UserEnabledConfigDefinition)),
        ("fused_params", parameters_of_kernels()),
    ],
)
def test_the_readme_has_every_setting_that_the_installed_versions_have(
    of: str, installed: Collection[str]
) -> None:
    """One that an upgrade brings must be read in its source, tried, and decided before it gets its line there."""
    documented = {name: versions for name, versions, _ in settings_in_readme(of)}
    assert set(installed) <= documented.keys()
    assert {name for name, versions in documented.items() if versions == "all"} <= set(installed)


def test_the_readme_says_which_settings_are_refused() -> None:
    refused = {
        of: {name for name, _, marking in settings_in_readme(of) if marking == Marking.REFUSED.value}
        for of in ("EmbeddingBagConfig", "EmbeddingComputeKernel")
    }
    assert refused["EmbeddingBagConfig"] == REFUSED_FLAGS.keys()
    followed = {kernel.value for kernel in FOLLOWED_KERNELS}
    assert {kernel.value for kernel in EmbeddingComputeKernel} - refused["EmbeddingComputeKernel"] == followed


def settings_in_readme(of: str) -> list[tuple[str, str, str]]:
    """Name, versions and marking of the settings of one kind."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if f"| `{of}` |" in line
    ]
    return [(name, row[2], row[3]) for row in rows for name in re.findall(r"`(\w+)`", row[0])]


def test_what_is_not_known_is_refused() -> None:
    new = update_rule("adam_of_tomorrow", WeightDecayMode.NONE, rounds_in_cache=False)
    decay = update_rule(ROWWISE, 17, rounds_in_cache=False)
    assert (new.marking, decay.marking) == (Marking.REFUSED, Marking.REFUSED)
    assert update_rule(EmbOptimType.ADAM, WeightDecayMode.NONE, rounds_in_cache=True) is ROUNDING_CACHE


def cached(**settings: Any) -> Any:
    module = {
        "optimizer": ROWWISE,
        "weight_decay_mode": WeightDecayMode.NONE,
        "lxu_cache_weights": torch.zeros(4, 8),
        "weights_precision": SparseType.FP16,
        "stochastic_rounding": True,
    }
    config = SimpleNamespace(embedding_tables=[SimpleNamespace(name="user")])
    return SimpleNamespace(emb_module=SimpleNamespace(**module | settings), _config=config)


def test_a_cache_that_rounds_at_random_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidInput, match=r"module 'bags', tables 'user'.*set `stochastic_rounding=False`"):
        check_tracked("bags", cached())


@pytest.mark.parametrize(
    "settings",
    [
        {"stochastic_rounding": False},
        {"weights_precision": SparseType.FP32},
        {"lxu_cache_weights": torch.zeros(4, 8, dtype=torch.float16)},
        {"lxu_cache_weights": torch.zeros(0)},
    ],
)
def test_a_cache_that_does_not_is_tracked(settings: dict[str, Any]) -> None:
    check_tracked("bags", cached(**settings))


def test_when_averages_over_time_are_due() -> None:
    ema = OPTIMIZERS[EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD].whole_table
    swap = OPTIMIZERS[EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD].whole_table
    assert ema is not None
    assert swap is not None
    settings = {"step_ema": 3.0, "step_start": 6.0, "step_swap": 4.0}
    assert [step for step in range(1, 13) if ema.is_due(settings, step)] == [6, 9, 12]
    assert [step for step in range(1, 13) if swap.is_due(settings, step)] == [4, 8, 12]
    for update in ema, swap:
        assert hasattr(SplitTableBatchedEmbeddingBagsCodegen, update.method)
