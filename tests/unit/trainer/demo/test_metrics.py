"""AUC and log loss against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.trainer.demo.metrics import auc, log_loss

SCORED = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40).filter(
    lambda events: len({label for label, _ in events}) == 2
)


@given(SCORED)
def test_auc_is_the_share_of_pairs_in_order(events: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in events], np.float32)
    scores = np.array([score for _, score in events], np.float32)
    pairs = [np.sign(p - n) / 2 + 0.5 for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(float(np.mean(pairs)))


def test_auc_needs_both_labels() -> None:
    with pytest.raises(ValueError, match="3 positive and 0 negative"):
        auc(np.ones(3, np.float32), np.zeros(3, np.float32))


@given(SCORED)
def test_log_loss_is_the_mean_negative_log_likelihood(events: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in events], np.float32)
    logits = np.array([score for _, score in events], np.float32)
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -np.mean(np.log(np.where(labels == 1, chance, 1 - chance)))
    assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-6)


def test_log_loss_of_extreme_logits_is_finite() -> None:
    assert log_loss(np.array([1.0, 0.0]), np.array([-1000.0, 1000.0])) == 1000.0
