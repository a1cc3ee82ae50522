"""Mixed precision: what autocast computes in, and a loss scale that only gradients see."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.micro_batches import (
    MOVED,
    Predicting,
    iterations,
    larger,
    micro_batches,
    state,
)
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Batch, Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import CPU, bag, bags
from tests.integration.trainer.tracking.batches import Features
from tests.integration.trainer.tracking.cases import CASES
from tests.integration.trainer.tracking.models import build
from tests.integration.trainer.tracking.rows import weights
from torch import nn
from torchrec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions

FLOAT16: dict[str, Any] = {"enable_amp": True, "amp_dtype": torch.float16}
# Of values of float16, which has 11 bits, after a few steps; smallest ones are lost where they are not scaled.
HALF_ROUNDING = 2e-3
# Times a gradient that is scaled, this is beyond what float32 holds.
TOO_MUCH = 3e38


class Network(Predicting):
    """Tells what forward computes in, and can make the gradients of what it looks up too large."""

    def __init__(self, **collections: nn.Module) -> None:
        super().__init__(**collections)
        self.hidden = nn.Linear(self.over.in_features, self.over.in_features)
        self.too_much = 0.0
        self.computed_in = set[torch.dtype]()
        self.hidden.register_forward_hook(lambda _, __, output: self.computed_in.add(output.dtype))

    def predicted(self, batch: Any) -> torch.Tensor:
        first, *others = self.found(batch)
        first = first + (first - first.detach()) * self.too_much
        hidden = self.hidden(torch.cat([first, *others, batch.dense], dim=1))
        predicted: torch.Tensor = self.over(hidden.relu()).squeeze(1)
        return predicted.float()


def training(sharding: Any = BOTH_RANKS, tables: EmbOptimType = EmbOptimType.EXACT_SGD) -> Training:
    return Training(Network(bags=bags("f", "g")), sharding, tables=tables)


def network(of: Any) -> Any:
    return of.model.module


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], dtype: torch.dtype
) -> None:
    """Train under autocast, with no pipeline and no loss scale."""
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss, _ = model(batch)
        loss.backward()
        optimizer.step()


def scale(pipeline: OnlinePipeline) -> float:
    found: float = pipeline.state_dict()["loss_scale"]["scale"]
    return found


def equal(some: Any, others: Any) -> bool:
    """Bit by bit, also where values are NaN."""
    return all(torch.equal(some[name].nan_to_num(7), others[name].nan_to_num(7)) for name in some | others)


def autocasts_in_backward(parameter: torch.Tensor) -> list[bool]:
    """Whether there is an autocast, whenever the parameter gets a gradient."""
    found = list[bool]()
    parameter.register_hook(lambda _: found.append(torch.is_autocast_enabled("cpu")))  # type: ignore[no-untyped-call]
    return found


@SCENARIOS.scenario("precision", ranks=2)
def forward_computes_in_the_type_asked_for_and_nothing_else_does() -> None:
    for dtype in torch.bfloat16, torch.float16:
        of = training()
        pipeline = of.pipeline(enable_amp=True, amp_dtype=dtype, loss_scale=1.0)
        in_backward = autocasts_in_backward(network(of).over.weight)
        through(pipeline, micro_batches(2))
        of.model.eval()
        through(pipeline, micro_batches(1))
        assert network(of).computed_in == {dtype}
        assert in_backward == [False, False]
        assert {held.dtype for held in of.held().values()} == {torch.float32}
        assert not torch.is_autocast_enabled("cpu")


def check_scale_is_not_seen(sharding: Any, tables: EmbOptimType, *, steps_of: int = 1) -> None:
    of, plain = training(sharding, tables), training(sharding, tables)
    before = of.held()
    batches = micro_batches(7)
    pipeline = of.pipeline(**FLOAT16, loss_scale=1024.0, grad_accum=steps_of)
    through(pipeline, batches)
    by_hand(plain.model, plain.optimizer, larger(batches, steps_of), torch.float16)
    distance = farthest(state(of), state(plain))
    assert scale(pipeline) == 1024
    assert farthest(of.held(), before) > MOVED
    assert distance < HALF_ROUNDING


@SCENARIOS.scenario("precision", ranks=2)
def fused_tables_do_not_see_the_scale() -> None:
    """Nor that of a step that ends early. They are updated once per step, if that is asked for or not."""
    for tables in EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        check_scale_is_not_seen(BOTH_RANKS, tables)
    for steps_of in 2, 3:
        check_scale_is_not_seen(BOTH_RANKS, EmbOptimType.EXACT_SGD, steps_of=steps_of)


@SCENARIOS.scenario("precision", ranks=2)
def replicated_and_dense_tables_do_not_see_the_scale() -> None:
    """Those that are not fused: alone in their lookup, or beside a fused one."""
    for steps_of in 1, 3:
        sharding = BOTH_RANKS | {"f": data_parallel()}
        check_scale_is_not_seen(sharding, EmbOptimType.EXACT_SGD, steps_of=steps_of)
    unfused = table_wise(rank=1, compute_kernel="dense")
    for other in row_wise(compute_kernel="fused"), table_wise(rank=1, compute_kernel="fused"):
        check_scale_is_not_seen({"f": unfused, "g": other}, EmbOptimType.EXACT_SGD)


@SCENARIOS.scenario("precision", ranks=2)
def a_model_of_tables_only_some_ranks_have_any() -> None:
    for case in CASES["tables-only"], CASES["nothing-on-a-rank"]:
        (model, optimizer), (plain, of_plain) = build(case), build(case)
        options = PipelineOptions(enable_amp=True, amp_dtype=torch.float16, loss_scale=1024.0)
        batches, features = list(Features(case.ids).batches(6)), weights(model)
        through(OnlinePipeline(model, optimizer, CPU, options), batches)
        by_hand(plain, of_plain, batches, torch.float16)
        assert farthest(weights(model), weights(plain)) < HALF_ROUNDING
        assert not features or not equal(weights(model), features)


def with_adam() -> Training:
    return Training(
        Network(bags=bags("f", "g")),
        BOTH_RANKS,
        tables=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        dense=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )


def everything(of: Training) -> dict[str, torch.Tensor]:
    """Parameters, rows, the states of all optimizers, and the iterations of kernels."""
    found = {f"{name}: {key}": value for name, states in _dense_states(of) for key, value in states.items()}
    return state(of) | found | {"iterations": torch.tensor(iterations(of))}


def _dense_states(of: Training) -> list[tuple[str, dict[str, torch.Tensor]]]:
    _, (_, dense) = of.optimizer._optims
    states = dense.state_dict()["state"]
    return [
        (name, {key: torch.as_tensor(value).clone() for key, value in states[name].items()}) for name in states
    ]


def overflow_in_a_batch(of: Training, batch: Batch) -> None:
    batch.dense[0, 0] = 1e30


def overflow_in_gradients_of_rows(of: Training, batch: Batch) -> None:
    network(of).too_much = TOO_MUCH


def nan_in_a_label(of: Training, batch: Batch) -> None:
    batch.label[0] = float("nan")


@SCENARIOS.scenario("precision", ranks=2)
def an_overflow_on_one_rank_leaves_all_ranks_as_they_were() -> None:
    """And one in a micro-batch leaves its whole step out."""
    for overflow in overflow_in_a_batch, overflow_in_gradients_of_rows, nan_in_a_label:
        for rank in 0, 1:
            _check_left_out(overflow, rank, steps_of=1)
    for rank in 0, 1:
        _check_left_out(overflow_in_gradients_of_rows, rank, steps_of=3)


def _check_left_out(overflow: Any, rank: int, *, steps_of: int) -> None:
    of, without = with_adam(), with_adam()
    steps = [micro_batches(steps_of, seed=seed) for seed in range(3)]
    pipeline = of.pipeline(**FLOAT16, loss_scale=1024.0, grad_accum=steps_of)
    through(pipeline, steps[0])
    before = everything(of)
    if dist.get_rank() == rank:
        overflow(of, steps[1][0])
    source = iter(steps[1])
    pipeline.progress(source)
    network(of).too_much = 0.0
    through(pipeline, source)
    assert equal(everything(of), before)
    assert scale(pipeline) == 512
    through(pipeline, steps[2])
    assert scale(pipeline) == 512
    assert not equal(everything(of), before)
    without.pipelined([*steps[0], *steps[2]], **FLOAT16, loss_scale=1024.0, grad_accum=steps_of)
    assert farthest(of.held(), without.held()) < HALF_ROUNDING


@SCENARIOS.scenario("precision", ranks=2)
def a_checkpoint_goes_on_with_its_scale() -> None:
    first, second = training(), training()
    saving, loading = first.pipeline(**FLOAT16, loss_scale=2.0**30), second.pipeline(**FLOAT16)
    assert scale(saving) == 2.0**30
    through(saving, micro_batches(20))
    saved = saving.state_dict()
    assert saved["trained"] == 20
    assert saved["loss_scale"]["scale"] == scale(saving) < 2.0**30
    loading.load_state_dict(saved)
    assert loading.state_dict() == saved
    through(loading, micro_batches(1))
    assert loading.state_dict()["trained"] == 21
    assert loading.state_dict()["loss_scale"]["_growth_tracker"] == saved["loss_scale"]["_growth_tracker"] + 1


# T3: what is updated in backward beside sharded tables.

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
    expected = rf"float16: module 'own' \(FusedEmbeddingBagCollection\): {ELSEWHERE}"
    with pytest.raises(InvalidInput, match=expected):
        OnlinePipeline(*with_fused_tables(), CPU, PipelineOptions(**FLOAT16))


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
