"""T3: a loss scale, and what is updated in backward beside sharded tables."""

from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.micro_batches import MOVED, Predicting, micro_batches
from tests.integration.trainer.pipelines.scenarios.precision import FLOAT16
from tests.integration.trainer.pipelines.training import Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import CPU, bag, bags
from torch import nn
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from deltasync.core.errors import InvalidInput
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions

ELSEWHERE = r"updated in backward, while its gradients are still multiplied by the scale of the loss"


def with_fused_tables() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Not under `DistributedModelParallel`, which TorchRec 1.8 cannot put around unsharded ones."""
    torch.manual_seed(1)
    model = Predicting(
        own=FusedEmbeddingBagCollection(
            tables=[bag("g")], optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}, device=CPU
        )
    )
    return model, torch.optim.SGD(model.over.parameters(), lr=0.1)


def with_both() -> tuple[nn.Module, torch.optim.Optimizer]:
    """And a layer, whose optimizer DDP runs on an accelerator only."""
    model, _ = with_fused_tables()
    over = model.get_submodule("over")
    apply_optimizer_in_backward(torch.optim.SGD, [over.get_parameter("weight")], {"lr": 0.1})
    return model, torch.optim.SGD([over.get_parameter("bias")], lr=0.1)


def with_a_layer_in_backward() -> Training:
    model = Predicting(bags=bags("f", "g"))
    apply_optimizer_in_backward(torch.optim.SGD, [model.over.weight], {"lr": 0.1})
    return Training(model, BOTH_RANKS)


@SCENARIOS.scenario("backward", ranks=2)
def tables_that_are_fused_and_not_sharded_are_refused_under_a_loss_scale() -> None:
    options: dict[str, Any] = FLOAT16
    expected = rf"float16: module 'own' \(FusedEmbeddingBagCollection\): {ELSEWHERE}"
    with pytest.raises(InvalidInput, match=expected):
        OnlinePipeline(*with_fused_tables(), CPU, PipelineOptions(**options))


@SCENARIOS.scenario("backward", ranks=2)
def layers_whose_optimizer_runs_in_backward_are_refused_under_a_loss_scale() -> None:
    expected = f"float16: parameter 'over.weight': {ELSEWHERE}"
    with pytest.raises(InvalidInput, match=expected):
        with_a_layer_in_backward().pipeline(**FLOAT16)


@SCENARIOS.scenario("backward", ranks=2)
def without_a_loss_scale_both_are_trained_as_without_a_pipeline() -> None:
    (model, optimizer), (plain, of_plain) = with_both(), with_both()
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    through(OnlinePipeline(model, optimizer, CPU), micro_batches(4, "g"))
    for batch in micro_batches(4, "g"):
        of_plain.zero_grad()
        plain(batch)[0].backward()
        of_plain.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


@SCENARIOS.scenario("backward", ranks=2)
def sharded_tables_with_an_optimizer_each_are_not_refused() -> None:
    model = Predicting(bags=bags("f", "g"))
    for table in model.get_submodule("bags.embedding_bags").children():
        apply_optimizer_in_backward(torch.optim.Adagrad, table.parameters(), {"lr": 0.1})
    of = Training(model, BOTH_RANKS)
    before = of.held()
    of.pipelined(micro_batches(2), **FLOAT16, loss_scale=1024.0)
    assert farthest(of.held(), before) > MOVED
