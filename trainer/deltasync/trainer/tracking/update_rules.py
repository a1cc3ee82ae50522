"""Rules that say which rows of a table change, given its settings in TorchRec and FBGEMM's optimizer.

The tracker refuses unknown settings, because a row that changes without a mark would be wrong in every predictor.
README.md lists every setting and its rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.tbe.config.optimizer_config import WeightDecayMode
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from deltasync.base.errors import InvalidInput


class Marking(Enum):
    """How the rows that a kernel changes are marked."""

    EXACT = "exact"
    """Only rows that were looked up change, and the tracker marks exactly these."""
    MORE = "marks more"
    """The tracker marks the rows that were looked up, and sometimes all rows of a table."""
    REFUSED = "refused"
    """The tracker refuses such a kernel."""


@dataclass(frozen=True)
class WholeTableUpdate:
    """A method of a kernel that may change all of its rows."""

    method: str
    # Function of the kernel's settings and iteration that says whether a call now changes rows.
    is_due: Callable[[Mapping[str, float], int], bool]
    settings: str  # The kernel's attribute with these settings.


@dataclass(frozen=True)
class UpdateRule:
    """How the tracker marks rows with an optimizer or a setting, and why."""

    marking: Marking
    reason: str
    # The method that sometimes changes all rows; None if there is none.
    whole_table: WholeTableUpdate | None = None


_LOOKED_UP = UpdateRule(Marking.EXACT, "changes the rows of each batch alone")
_NO_KERNEL = UpdateRule(Marking.REFUSED, "FBGEMM has no kernel for it")

OPTIMIZERS = {
    EmbOptimType.EXACT_SGD: _LOOKED_UP,
    EmbOptimType.EXACT_ADAGRAD: _LOOKED_UP,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _LOOKED_UP,
    EmbOptimType.ADAM: _LOOKED_UP,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _LOOKED_UP,
    EmbOptimType.LAMB: _LOOKED_UP,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _LOOKED_UP,
    EmbOptimType.LARS_SGD: _LOOKED_UP,
    EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD: UpdateRule(
        Marking.MORE,
        "moves half of the columns of every row each `step_ema` iterations: all rows are marked then",
        WholeTableUpdate(
            "ema_inplace",
            lambda its, now: now % int(its["step_ema"]) == 0 and now >= int(its["step_start"]),
            "_emainplace_mode",
        ),
    ),
    EmbOptimType.ENSEMBLE_ROWWISE_ADAGRAD: UpdateRule(
        Marking.MORE,
        "replaces every row by its average each `step_swap` iterations: all rows are marked then",
        WholeTableUpdate("ensemble_and_swap", lambda its, now: now % int(its["step_swap"]) == 0, "_ensemble_mode"),
    ),
    EmbOptimType.NONE: UpdateRule(Marking.REFUSED, "leaves the update to other code, which may change any row"),
    EmbOptimType.SGD: _NO_KERNEL,
    EmbOptimType.ROWWISE_ADAGRAD: _NO_KERNEL,
    EmbOptimType.EXACT_ROWWISE_WEIGHTED_ADAGRAD: _NO_KERNEL,
    EmbOptimType.MADGRAD: _NO_KERNEL,
    EmbOptimType.SHAMPOO: _NO_KERNEL,
    EmbOptimType.SHAMPOO_V2: _NO_KERNEL,
}

_DECAYS_LOOKED_UP = UpdateRule(Marking.EXACT, "the rows of each batch decay, others stay")

WEIGHT_DECAYS = {
    WeightDecayMode.NONE: _DECAYS_LOOKED_UP,
    WeightDecayMode.L2: _DECAYS_LOOKED_UP,
    WeightDecayMode.DECOUPLE: _DECAYS_LOOKED_UP,
    WeightDecayMode.COUNTER: UpdateRule(
        Marking.EXACT, "counts of ids weigh the decay and the gradients of the batch's rows, whatever its options"
    ),
    WeightDecayMode.COWCLIP: UpdateRule(
        Marking.EXACT, "gradients of the batch's rows are clipped by the norms of these rows"
    ),
    WeightDecayMode.DECOUPLE_GLOBAL: UpdateRule(
        Marking.EXACT,
        "a row makes up for its decay when it is next looked up; evaluation reads it as it is",
    ),
}

ROUNDING_CACHE = UpdateRule(
    Marking.REFUSED,
    "rows that leave a cache of another type than the table's are rounded at random each time, looked up or not: "
    "set `stochastic_rounding=False`, or `cache_precision` to the table's type",
)


# Kernels whose rows are tensors that stay in place and change by the rules above.
FOLLOWED_KERNELS = (
    EmbeddingComputeKernel.DENSE,
    EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM,
    EmbeddingComputeKernel.FUSED_UVM_CACHING,
)

# Config flags that make TorchRec change or move rows without calling a hook, and what each does.
REFUSED_FLAGS = {
    "stash_weights": "TorchRec frees the memory of the rows between forward and backward",
    "enable_embedding_update": "TorchRec's `write` changes rows that no lookup has a gradient for",
    "use_virtual_table": "TorchRec makes rows as their ids come",
}


def check_settings(fqn: str, config: Any, compute_kernel: str) -> None:
    """Check that rows of a table can be tracked. All ranks check all tables, so that they fail together."""
    advice = "or leave the table out (fqns_to_skip)"
    for flag, effect in REFUSED_FLAGS.items():
        if getattr(config, flag, False):
            raise InvalidInput(
                f"table {fqn!r} has {flag}=True: {effect}, which is not tracked; set it to False, {advice}"
            )
    followed = [kernel.value for kernel in FOLLOWED_KERNELS]
    if compute_kernel not in followed:
        raise InvalidInput(
            f"table {fqn!r} has compute kernel {compute_kernel!r}, whose rows cannot be tracked; "
            f"use one of: {', '.join(followed)}, {advice}"
        )


def update_rule(optimizer: Any, weight_decay: Any, *, rounds_in_cache: bool) -> UpdateRule:
    """The rule for a fused kernel."""
    decay = WEIGHT_DECAYS.get(weight_decay, UpdateRule(Marking.REFUSED, "this weight decay is unknown"))
    if rounds_in_cache:
        return ROUNDING_CACHE
    if decay.marking is Marking.REFUSED:
        return decay
    return OPTIMIZERS.get(optimizer, UpdateRule(Marking.REFUSED, "this optimizer is unknown"))


def rule_of(kernel: Any) -> UpdateRule:
    """The rule for a kernel of a lookup, fused or not."""
    emb_module = kernel.emb_module
    optimizer = getattr(emb_module, "optimizer", None)
    if optimizer is None:
        return UpdateRule(Marking.EXACT, "it is not fused: its rows are compared at each read")
    return update_rule(optimizer, _weight_decay(emb_module), rounds_in_cache=_rounds_in_cache(emb_module))


def check_tracked(name: str, kernel: Any) -> None:
    """Check that the rows of a kernel of module `name` can be tracked."""
    rule = rule_of(kernel)
    if rule.marking is Marking.REFUSED:
        tables = ", ".join(repr(config.name) for config in kernel._config.embedding_tables)
        decay = _weight_decay(kernel.emb_module)
        raise InvalidInput(
            f"module {name!r}, tables {tables}: rows under optimizer {str(kernel.emb_module.optimizer)!r} "
            f"(weight decay {getattr(decay, 'name', decay)}) cannot be tracked: {rule.reason}; "
            "use another optimizer or setting, or leave the tables out (fqns_to_skip)"
        )


def _weight_decay(emb_module: Any) -> Any:
    return getattr(emb_module, "weight_decay_mode", WeightDecayMode.NONE)


def _rounds_in_cache(emb_module: Any) -> bool:
    cache = getattr(emb_module, "lxu_cache_weights", None)
    if cache is None or not cache.numel() or not emb_module.stochastic_rounding:
        return False
    return bool(cache.dtype != emb_module.weights_precision.as_dtype())
