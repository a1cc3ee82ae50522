"""The rule for each optimizer and setting of TorchRec and FBGEMM, in the code and in the README."""

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

# Settings whose effect on rows was read in the sources of TorchRec 1.8 and 1.9 with FBGEMM 1.7 and 1.8.
REVIEWED = {
    "EmbeddingBagConfig": (
        "num_embeddings embedding_dim name feature_names pooling data_type weight_init_max weight_init_min "
        "init_fn need_pos input_dim total_num_buckets num_embeddings_post_pruning "
        "virtual_table_eviction_policy stash_weights enable_embedding_update use_virtual_table"
    ),
    "EmbeddingComputeKernel": (
        "dense fused fused_uvm fused_uvm_caching key_value ssd_virtual_table dram_virtual_table "
        "dram_ssd_virtual_table fused_triton quant quant_uvm quant_uvm_caching customized_kernel"
    ),
    "ParameterSharding": (
        "sharding_type ranks sharding_spec compute_kernel cache_params enforce_hbm stochastic_rounding "
        "bounds_check_mode output_dtype key_value_params"
    ),
    "CacheParams": (
        "algorithm load_factor reserved_memory precision prefetch_pipeline stats multipass_prefetch_config"
    ),
    "fused_params": (
        "optimizer weight_decay_mode learning_rate eps momentum weight_decay eta beta1 beta2 "
        "optimizer_state_dtypes gradient_clipping max_gradient max_norm counter_based_regularization "
        "cowclip_regularization global_weight_decay ensemble_mode emainplace_mode extra_optimizer_config "
        "stochastic_rounding cache_precision cache_algorithm cache_load_factor cache_sets "
        "cache_reserved_memory prefetch_pipeline multipass_prefetch_config enforce_hbm "
        "uvm_non_rowwise_momentum uvm_host_mapped preallocated_host_buffers bounds_check_mode output_dtype "
        "use_experimental_tbe is_qr_tbe embedding_table_index_type embedding_table_offset_type "
        "use_one_tbe_per_table record_cache_metrics gather_uvm_cache_stats stats_reporter_config "
        "tbe_input_multiplexer_config enable_raw_embedding_streaming res_store_shards res_enabled_tables "
        "embedding_specs feature_table_map weights_precision pooling_mode device table_names "
        "embedding_shard_info res_params __register_tbes_in_named_modules "
        "__register_quant_state_dict_split_scale_bias __register_tbe_row_alignment "
        "__register_tbe_bounds_check_mode __register_lengths_to_offsets_lookup __register_ssd_table_list "
        "__register_is_ssd_table"
    ),
    "UserEnabledConfigDefinition": (
        "use_rowwise_bias_correction use_writeback_bwd_prehook writeback_first_feature_only precompute_writeback"
    ),
}
REVIEWED_NEWER = {
    "EmbeddingComputeKernel": ("unfused_tpu"),
    "fused_params": (
        "res_chunk_size res_num_consumers res_num_uvm_hit_copy_threads res_num_hbm_copy_threads "
        "enable_hbm_streaming res_hbm_drain_interval res_use_copy_done_token __register_is_device_ro"
    ),
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
def test_every_setting_of_the_installed_versions_is_reviewed(of: str, installed: Collection[str]) -> None:
    """A new one must be read in its source and tried; if it is not exact, README.md lists it."""
    reviewed = set(REVIEWED[of].split())
    assert reviewed <= set(installed) <= reviewed | set(REVIEWED_NEWER.get(of, "").split())


def test_the_readme_lists_the_settings_that_are_not_exact() -> None:
    kernels = {kernel.value for kernel in EmbeddingComputeKernel}
    followed = {kernel.value for kernel in FOLLOWED_KERNELS}
    newer = set(REVIEWED_NEWER["EmbeddingComputeKernel"].split())
    assert settings_in_readme("EmbeddingBagConfig", Marking.REFUSED) == REFUSED_FLAGS.keys()
    assert settings_in_readme("EmbeddingComputeKernel", Marking.EXACT) == followed
    assert settings_in_readme("EmbeddingComputeKernel", Marking.REFUSED) == (kernels | newer) - followed
    for update in (rule.whole_table for rule in OPTIMIZERS.values() if rule.whole_table):
        assert update.settings.removeprefix("_") in settings_in_readme("fused_params", Marking.MORE)


def settings_in_readme(of: str, marking: Marking) -> set[str]:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines() if line[:1] == "|"]
    return {
        name for row in rows if row[1:3] == [f"`{of}`", marking.value] for name in re.findall(r"`(\w+)`", row[0])
    }


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
