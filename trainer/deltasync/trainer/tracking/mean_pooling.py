"""Features that TorchRec divides by their lengths once too often.

Of a collection with a table that is sharded by rows and takes means, TorchRec 1.8.0 divides all features by
their lengths but those of tables by rows that take sums (`_create_mean_pooling_divisor` in
`torchrec.distributed.embeddingbag`). Those of tables that are sharded otherwise were pooled before. Rows are right
all the same: what is trained is another model than the unsharded one that serves.
"""

from collections.abc import Iterator

from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from deltasync.trainer.tracking.modules import sharded_modules


def wrongly_divided(model: nn.Module) -> Iterator[str]:
    """For each collection that has some, a sentence that names them."""
    for name, module in sharded_modules(model):
        if isinstance(module, ShardedEmbeddingBagCollection) and module._has_mean_pooling_callback:
            by_row = {feature for each in module._pooling_type_to_rs_features.values() for feature in each}
            configs = module._table_name_to_config.values()
            others = [feature for config in configs for feature in config.feature_names if feature not in by_row]
            if others:
                yield (
                    f"module {name!r}: TorchRec divides features {', '.join(others)} by their lengths once too "
                    "often, since other tables of the collection are sharded by rows and take means: unless these "
                    "features have one id each, predictors compute other outputs from the same rows. Give the "
                    "tables that are sharded by rows a collection of their own"
                )
