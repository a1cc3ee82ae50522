"""The models that the tracker is tried on. "f", "g" and "h" are features."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tests.integration.trainer.tracking.models import (
    Case,
    TableSpec,
    bags,
    collision_bags,
    collision_sequences,
    processed,
    sequences,
)
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding
from torchrec.modules.embedding_configs import DataType, PoolingType

NEVER = 1000
# Narrower tables have one block of columns in a grid.
WIDE = 256


def fused(sharding: Callable[..., ParameterShardingGenerator], *chosen: Any) -> ParameterShardingGenerator:
    return _by_kernel("fused", sharding(*chosen))


def dense(sharding: Callable[..., ParameterShardingGenerator], *chosen: Any) -> ParameterShardingGenerator:
    return _by_kernel("dense", sharding(*chosen))


def _by_kernel(kernel: str, sharding: ParameterShardingGenerator) -> ParameterShardingGenerator:
    """Not every sharding lets one choose the kernel, and on a CPU the fused one would not be chosen."""

    def choose(*arguments: Any) -> ParameterSharding:
        found: ParameterSharding = sharding(*arguments)
        found.compute_kernel = kernel
        return found

    return choose


FIRST, SECOND, ROWS = fused(table_wise, 0), fused(table_wise, 1), fused(row_wise)
BOTH, TWO_ON_ONE = fused(column_wise, [0, 1]), fused(column_wise, [1, 1])
COPIES = data_parallel()


def table(sharding: ParameterShardingGenerator, rows: int, *features: str, **more: Any) -> TableSpec:
    return TableSpec(sharding, rows, features, **more)


def with_momentum(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Changes rows at every step, whether looked up or not."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


# On a CPU, a kernel must have rows: a rank that holds none of a row-wise table holds some of another.
CASES = {
    "every-sharding": Case(
        {
            "bags": bags(
                {
                    "rows": table(ROWS, 23, "f"),
                    "whole": table(SECOND, 40, "g"),
                    "columns": table(BOTH, 17, "f", "h"),
                    "halves": table(TWO_ON_ONE, 19, "h"),
                    "copies": table(COPIES, 11, "g"),
                }
            ),
            "sequences": sequences({"rows": table(ROWS, 29, "f")}),
        }
    ),
    "table-wise": Case(
        {"m": bags({"a": table(FIRST, 20, "f"), "b": table(SECOND, 30, "f", "g"), "c": table(SECOND, 25, "f")})}
    ),
    "column-wise": Case(
        {
            "m": bags(
                {
                    "a": table(BOTH, 20, "f"),
                    "b": table(TWO_ON_ONE, 30, "f", "g"),
                    "c": table(fused(column_wise, [0, 1, 0]), 25, "g", dim=12),
                }
            )
        }
    ),
    "table-row-wise": Case(
        {"m": bags({"a": table(fused(table_row_wise, 0), 21, "f"), "b": table(ROWS, 30, "f", "g")})}
    ),
    "copies-with-momentum": Case(
        {"m": bags({"a": table(COPIES, 20, "f"), "b": table(ROWS, 30, "f", "g")})}, optimizer=with_momentum
    ),
    "dense-kernel": Case(
        {
            "m": bags(
                {
                    "a": table(dense(table_wise, 1), 20, "f"),
                    "b": table(dense(row_wise), 21, "f"),
                    "c": table(dense(column_wise, [0, 1]), 22, "g"),
                    "d": table(dense(column_wise, [1, 1]), 23, "g"),
                    "e": table(dense(table_row_wise, 0), 25, "f", "g"),
                }
            )
        },
        optimizer=with_momentum,
    ),
    "sequences": Case(
        {
            "m": sequences(
                {
                    "a": table(FIRST, 20, "f"),
                    "b": table(ROWS, 30, "f", "g"),
                    "c": table(BOTH, 25, "g"),
                    "d": table(TWO_ON_ONE, 35, "h"),
                    "e": table(ROWS, 33, "f"),
                }
            )
        }
    ),
    # Weights are where pipelines keep the positions, also once they are detached.
    "processed": Case(
        {"m": processed({"a": table(FIRST, 20, "f"), "b": table(ROWS, 30, "f", "g")})}, weighted=True
    ),
    "evictions": Case(
        {"m": collision_bags({"a": table(ROWS, 20, "f"), "b": table(ROWS, 30, "g", "h")}, 2)},
        raw_ids=True,
    ),
    "evicted-sequences": Case(
        {"m": collision_sequences({"a": table(ROWS, 20, "f"), "b": table(ROWS, 30, "g")}, 2)},
        raw_ids=True,
    ),
    "same-names": Case(
        {
            "m": bags({"a": table(FIRST, 20, "f")}),
            "n": bags({"a": table(ROWS, 30, "f")}),
            "o": sequences({"a": table(SECOND, 25, "f")}),
        }
    ),
    "tables-only": Case({"m": bags({"a": table(FIRST, 20, "f"), "b": table(ROWS, 30, "g")})}, dense=False),
    "nothing-on-a-rank": Case({"m": bags({"a": table(SECOND, 20, "f")})}, dense=False),
    "fewer-rows-than-ranks": Case(
        {
            "m": bags({"a": table(ROWS, 1, "f"), "b": table(ROWS, 30, "g")}),
            "n": sequences({"c": table(ROWS, 1, "f"), "d": table(ROWS, 30, "g")}),
        }
    ),
    "weighted": Case(
        {
            "m": bags(
                {"a": table(FIRST, 20, "f"), "b": table(ROWS, 30, "g", pooling=PoolingType.MEAN)}, weighted=True
            )
        },
        weighted=True,
    ),
    "variable-batch-of-several": Case(
        {
            "m": bags(
                {
                    "a": table(ROWS, 20, "f"),
                    "b": table(SECOND, 30, "f", "g"),
                    "c": table(TWO_ON_ONE, 25, "h", dim=16),
                    "d": table(SECOND, 22, "f", dtype=DataType.FP16),
                }
            )
        },
        variable=True,
    ),
    "several-kernels": Case(
        {
            "m": bags(
                {
                    "a": table(FIRST, 20, "f", optimizer=torch.optim.SGD),
                    "b": table(FIRST, 21, "f", dim=16),
                    "c": table(FIRST, 22, "g", pooling=PoolingType.MEAN),
                    "d": table(FIRST, 23, "g", dtype=DataType.FP16),
                    "e": table(ROWS, 24, "f", "g", optimizer=torch.optim.Adagrad),
                    "f": table(TWO_ON_ONE, 25, "f", optimizer=torch.optim.Adagrad),
                    "g": table(ROWS, 26, "f", dtype=DataType.FP16, pooling=PoolingType.MEAN),
                }
            )
        }
    ),
    "grid": Case(
        {
            "m": bags(
                {
                    "a": table(fused(grid_shard, [0, 1]), 21, "f", dim=WIDE),
                    "b": table(fused(grid_shard, [1, 1]), 30, "f", "g", dim=WIDE),
                    "c": table(dense(grid_shard, [1, 0]), 22, "g", dim=WIDE),
                }
            )
        },
        ranks=4,
    ),
    "table-row-wise-on-hosts": Case(
        {
            "m": bags(
                {"a": table(fused(table_row_wise, 0), 21, "f"), "b": table(fused(table_row_wise, 1), 30, "f", "g")}
            )
        },
        ranks=4,
    ),
    "columns-on-four-ranks": Case(
        {
            "m": bags(
                {
                    "a": table(fused(column_wise, [3, 1, 0, 2]), 21, "f", dim=16),
                    "b": table(fused(column_wise, [3, 1, 3]), 25, "f", "g", dim=12),
                }
            )
        },
        ranks=4,
    ),
    "fewer-rows-than-four-ranks": Case(
        {
            "m": bags({"a": table(ROWS, 3, "f"), "b": table(ROWS, 5, "g"), "c": table(ROWS, 30, "h")}),
            "n": sequences({"a": table(ROWS, 3, "f"), "b": table(ROWS, 30, "h")}),
        },
        ranks=4,
    ),
}
