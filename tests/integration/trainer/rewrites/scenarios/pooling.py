"""Collections whose features TorchRec divides once too often are logged, and no others."""

import torch
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import bag, bags, sharded
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.modules import wrongly_divided

ROWS, WHOLE = row_wise(compute_kernel="fused"), table_wise(rank=0, compute_kernel="fused")
MEAN, SUM = {"pooling": PoolingType.MEAN}, {"pooling": PoolingType.SUM}
# Two ids of each feature.
TWICE = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 2, 1, 2]), torch.tensor([2, 2]))


def is_divided(sharding: dict[str, object], **pooling: dict[str, PoolingType]) -> bool:
    """Whether a sharded collection computes other outputs of feature b than one in one piece."""
    tables = [bag(name, **pooling[name]) for name in ("a", "b")]
    model, plain = sharded({"bags": bags(*tables)}, sharding), EmbeddingBagCollection(tables=tables)
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.fill_(1.0)
        outputs = [module(TWICE).to_dict()["b"] for module in (model.module.bags, plain)]
    told = list(wrongly_divided(model))
    said = "'bags': TorchRec divides features b by their lengths once too often"
    assert all(said in each for each in told)
    differs = not torch.allclose(outputs[0], outputs[1], rtol=1e-4)
    assert bool(told) == differs
    return differs


@SCENARIOS.scenario("pooling", ranks=2)
def features_that_are_divided_once_too_often_are_told() -> None:
    assert is_divided({"a": ROWS, "b": WHOLE}, a=MEAN, b=MEAN)
    assert is_divided({"a": ROWS, "b": WHOLE}, a=MEAN, b=SUM)
    assert not is_divided({"a": ROWS, "b": WHOLE}, a=SUM, b=MEAN)
    assert not is_divided({"a": ROWS, "b": ROWS}, a=MEAN, b=MEAN)
    assert not is_divided({"a": ROWS, "b": ROWS}, a=MEAN, b=SUM)
    assert not is_divided({"a": WHOLE, "b": WHOLE}, a=MEAN, b=MEAN)
