"""TensorDicts that cannot be right: an error says which key, and nothing is trained."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.integration.trainer.pipelines.jagged import (
    Lookups,
    as_tensordict,
    by_lengths,
    flat,
    ids,
    in_both_ways,
    nested,
)
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.tensordicts import UnshardedBags, UnshardedSequences
from tests.integration.trainer.pipelines.training import Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import META, bag, bags, sequence, sequences
from torch import nn

from deltasync.core.errors import InvalidInput

EXAMPLES = [[1, 2], [3]]


def _unsharded_bags() -> nn.Module:
    return UnshardedBags(tables=[bag("f"), bag("g")], device=META)


def _unsharded_sequences() -> nn.Module:
    return UnshardedSequences(tables=[sequence("f"), sequence("g")], device=META)


KINDS = (lambda: bags("f", "g"), lambda: sequences("f", "g"), _unsharded_bags, _unsharded_sequences)


def _refused(batch: Any, *told: str) -> None:
    for kind in KINDS:
        for train in in_both_ways(lambda kind=kind: Training(Lookups(table=kind()), BOTH_RANKS)):  # type: ignore[misc]
            with pytest.raises(InvalidInput) as refusal:
                train([batch])
            assert all(part in str(refusal.value) for part in told), refusal.value


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def a_key_that_is_missing() -> None:
    _refused(TensorDict({"f": nested(EXAMPLES), "h": nested(EXAMPLES)}), "'g'", "f, h")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def other_numbers_of_examples() -> None:
    _refused(TensorDict({"f": nested(EXAMPLES), "g": by_lengths([[1]])}), "'g'", "'f'", "variable batch size")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def ids_that_do_not_lie_one_after_the_other() -> None:
    for ids_of_g in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)):
        _refused(TensorDict({"f": nested(EXAMPLES), "g": ids_of_g}), "'g'", "int64")
    strided = torch.nested.nested_tensor([flat([one]) for one in EXAMPLES], layout=torch.strided)
    _refused(TensorDict({"f": nested(EXAMPLES), "g": strided}), "'g'", "strided")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def values_that_are_no_ids() -> None:
    lengths = torch.tensor([2, 1])
    for values in (torch.ones(3), torch.ones(3, dtype=torch.bool), torch.ones(3, 2, dtype=torch.int64)):
        jagged = torch.nested.nested_tensor(list(torch.split(values, [2, 1])), layout=torch.jagged)
        _refused(TensorDict({"f": nested(EXAMPLES), "g": jagged}), "'g'")
        _refused(TensorDict({"f": nested(EXAMPLES), "g": type(by_lengths([]))(values, lengths=lengths)}), "'g'")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def what_is_no_tensor() -> None:
    for value in ("text", TensorDict({"f": nested(EXAMPLES)}), 5):
        _refused(TensorDict({"f": nested(EXAMPLES), "g": value}), "'g'")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def lengths_that_do_not_add_up() -> None:
    """Two that are wrong in opposite ways would have ids of the one taken for the other's."""
    jagged = type(by_lengths([]))
    longer = jagged(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 2]))
    shorter = jagged(torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1]))
    _refused(TensorDict({"f": nested(EXAMPLES), "g": longer}), "'g'", "3 ids", "4")
    _refused(TensorDict({"f": longer, "g": shorter}), "'f'")


@SCENARIOS.scenario("refused tensordicts", ranks=2)
def no_batch_is_trained_on_with_a_refused_one() -> None:
    """A pipeline sends ids out before it trains on the batch before: that one has not been trained on either."""
    good, bad = as_tensordict(next(ids(1))), TensorDict({"f": nested(EXAMPLES)})
    training = Training(Lookups(table=bags("f", "g")), BOTH_RANKS)
    pipeline, before = training.pipeline(), training.held()
    with pytest.raises(InvalidInput):
        through(pipeline, [bad, good])
    assert farthest(before, training.held()) == 0
