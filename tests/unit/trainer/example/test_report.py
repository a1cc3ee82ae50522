"""AUC, log loss and freshness against their definitions, and the report that a person reads."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deltasync.trainer.example.compare import WHATS
from deltasync.trainer.example.report import auc, freshness, log_loss, print_report

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


def test_freshness_counts_every_step_by_the_release_that_brought_it() -> None:
    ends = [1_000_000_000, 2_000_000_000, 3_000_000_000]
    applied = [(1, 0, 100), (3, 2, 2_500_000_000)]
    assert freshness(ends, applied) == [1.5, 0.5]
    assert freshness(ends, [(3, 3, 2_500_000_000)]) == [1.5, 0.5, 0.0], "the clock was set back"


def test_what_a_replica_received_is_a_share_of_what_was_published() -> None:
    report = {
        "freshness_seconds": {"p50": 0.1, "p99": 0.2, "max": 0.3},
        "bytes_full_push": 1_024_300_000,
        "bytes_published": 29_400_000,
        "bytes_received": 28_500_000,
        "policy": {"value_type": "fp32", "top_k": None},
        "answers": None,
        "workers": 0,
        **{f"{what}_equal": True for what in WHATS},
        **{f"{what}_compared": 10 for what in WHATS},
        "evictions": 0,
        "rows_used": {},
        "versions": 294,
        "steps": 586,
        "rows_published": 471_537,
        "rows_compared": 108_506,
        "events_evaluated": 1000,
        "auc": dict.fromkeys(("trainer", "synced", "frozen"), 0.5),
        "log_loss": dict.fromkeys(("trainer", "synced", "frozen"), 0.5),
    }
    printed = io.StringIO()
    print_report(report, Console(file=printed, width=200))
    assert (
        "received      28.5 MB by a replica, 97 % of what was published, 1/36 of full pushes\n"
        in printed.getvalue()
    )
