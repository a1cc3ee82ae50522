"""Embedding modules that do more than looking up, sharded in several ways."""

from collections.abc import Iterator
from typing import Any

from tests.integration.trainer.pipelines.comparison import check_same, told
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import through
from tests.integration.trainer.torchrec_defects.models import CPU
from tests.integration.trainer.tracking.batches import Batch, Features
from tests.integration.trainer.tracking.cases import BOTH, FIRST, NEVER, ROWS, SECOND, table
from tests.integration.trainer.tracking.models import (
    Case,
    Part,
    bags,
    build,
    collision_bags,
    collision_sequences,
    processed,
    sequences,
)
from tests.integration.trainer.tracking.rows import weights
from torch import nn

from deltasync.trainer.pipelines import OnlinePipeline

scenario = SCENARIOS.scenario("embedding modules", ranks=2)

BATCHES = 9
TABLES = {"t": table(FIRST, 20, "f"), "u": table(SECOND, 15, "f", "g"), "v": table(ROWS, 18, "h")}


def _batches(case: Case) -> Iterator[Batch]:
    return Features(case.ids, weighted=case.weighted, variable=case.variable).batches(BATCHES)


def _check(*parts: Part, **options: Any) -> None:
    case = Case({f"part{number}": part for number, part in enumerate(parts)}, **options)
    (plain, plain_optimizer), (model, optimizer) = build(case), build(case)
    assert _state(plain) == _state(model)
    with told() as reasons:
        outputs = through(OnlinePipeline(model, optimizer, CPU), _batches(case))
    expected = []
    for batch in _batches(case):
        plain_optimizer.zero_grad()
        loss, output = plain(batch)
        loss.backward()
        plain_optimizer.step()
        expected.append(output)
    assert reasons == {}
    assert outputs == expected
    check_same(weights(model), weights(plain))
    assert _state(model) == _state(plain)


def _state(model: nn.Module) -> dict[str, list[Any]]:
    """Buffers, among them what raw ids are mapped to."""
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


@scenario
def ids_are_weighted_by_position() -> None:
    _check(processed(TABLES))


@scenario
def raw_ids_are_mapped_to_rows() -> None:
    tables = {"t": table(ROWS, 20, "f"), "u": table(ROWS, 30, "g", "h")}
    for kind in (collision_bags, collision_sequences):
        _check(kind(tables, NEVER), raw_ids=True)


@scenario
def bags_and_sequences_of_weighted_features_and_of_various_batch_sizes() -> None:
    _check(bags(TABLES), sequences({"s": table(ROWS, 20, "f"), "r": table(FIRST, 20, "g")}))
    _check(bags({"t": table(BOTH, 20, "f")}), sequences({"s": table(BOTH, 20, "f")}))
    _check(bags(TABLES, weighted=True), weighted=True)
    _check(bags({"t": table(FIRST, 20, "f"), "u": table(ROWS, 20, "g")}), variable=True)
