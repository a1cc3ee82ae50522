import itertools
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deltasync.trainer.clicks.events import Events, concatenate
from deltasync.trainer.clicks.stream import limit
from deltasync.trainer.clicks.synthetic import ClickWorld, SyntheticOptions, synthetic_events

SMALL = SyntheticOptions(users=50, items=40, block=100)


def first(options: SyntheticOptions, n: int) -> Events:
    return concatenate(list(limit(synthetic_events(options), n)))


def auc(label: NDArray[np.float32], score: NDArray[np.float64]) -> float:
    rank = np.empty(len(score))
    rank[np.argsort(score)] = np.arange(1, len(score) + 1)
    clicks = label.sum()
    return float((rank[label == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(label) - clicks)))


def online_scores(events: Events, *, learn_until: int, rate: float = 0.15) -> NDArray[np.float64]:
    """Prequential scores of an online model of one bias per user and item."""
    users, items = np.zeros(events.user.max() + 1), np.zeros(events.item.max() + 1)
    scores = np.empty(len(events))
    for start in range(0, len(events), 64):
        batch = events.take(slice(start, start + 64))
        score = scores[start : start + 64] = users[batch.user] + items[batch.item]
        if start < learn_until:
            step = rate * (batch.label - 1 / (1 + np.exp(-score)))
            np.add.at(users, batch.user, step)
            np.add.at(items, batch.item, step)
    return scores


def test_equal_options_give_equal_streams() -> None:
    one, other = first(SMALL, 250), first(SMALL, 250)
    for field in fields(Events):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


def test_another_seed_gives_another_stream() -> None:
    one, other = first(SMALL, 250), first(replace(SMALL, seed=1), 250)
    assert not np.array_equal(one.user, other.user)
    assert not np.array_equal(one.label, other.label)


def test_blocks_differ_and_can_be_drawn_out_of_order() -> None:
    blocks = list(itertools.islice(synthetic_events(SMALL), 3))
    assert not np.array_equal(blocks[0].user, blocks[1].user)
    np.testing.assert_array_equal(ClickWorld(SMALL).block(2).label, blocks[2].label)


def test_events_are_in_range_typed_and_in_time_order() -> None:
    events = first(replace(SMALL, start_unix=1000, seconds_per_event=0.5), 1000)
    assert [getattr(events, f.name).dtype for f in fields(Events)] == [np.int64] * 4 + [np.float32]
    np.testing.assert_array_equal(events.index, np.arange(1000))
    np.testing.assert_array_equal(events.timestamp, 1000 + np.arange(1000) // 2)
    assert events.user.min() >= 0
    assert events.user.max() < SMALL.users
    assert events.item.min() >= 0
    assert events.item.max() < SMALL.items
    assert set(np.unique(events.label)) == {0.0, 1.0}


def test_popularity_moves_over_the_items() -> None:
    options = SyntheticOptions(items=1000, turnover=100_000, block=10_000)
    world = ClickWorld(options)
    early, later = world.block(0), world.block(5)
    top = np.bincount(early.item, minlength=1000).argsort()[-20:]
    assert np.isin(early.item, top).mean() > 5 * np.isin(later.item, top).mean()


def test_the_appeal_of_an_item_drifts() -> None:
    world, events = ClickWorld(SyntheticOptions()), first(SyntheticOptions(), 1000)
    later = replace(events, index=events.index + SyntheticOptions().quality_period // 2)
    assert np.abs(world.probability(later) - world.probability(events)).mean() > 0.2


def test_another_seed_gives_another_world() -> None:
    events = first(SMALL, 100)
    other = ClickWorld(replace(SMALL, seed=1)).probability(events)
    assert np.abs(other - ClickWorld(SMALL).probability(events)).mean() > 0.1


def test_labels_follow_the_stated_probability() -> None:
    events = first(SyntheticOptions(), 50_000)
    probability = ClickWorld(SyntheticOptions()).probability(events)
    for low in (0.1, 0.4, 0.7):
        chosen = (probability >= low) & (probability < low + 0.1)
        assert events.label[chosen].mean() == pytest.approx(probability[chosen].mean(), abs=0.03)


def test_a_stale_model_is_clearly_worse_than_a_fresh_one() -> None:
    events = first(SyntheticOptions(), 100_000)
    second_half = slice(50_000, None)
    label = events.label[second_half]
    best = auc(label, ClickWorld(SyntheticOptions()).probability(events)[second_half])
    fresh = auc(label, online_scores(events, learn_until=100_000)[second_half])
    frozen = auc(label, online_scores(events, learn_until=50_000)[second_half])
    assert 0.78 < best < 0.86
    assert fresh > 0.72
    assert fresh - frozen > 0.05


@pytest.mark.parametrize("name", ["users", "items", "block", "factors", "turnover", "quality_period"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: 0, expected a whole number of at least 1"):
        replace(SMALL, **{name: 0})


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", -1), ("start_unix", -1), ("seconds_per_event", 0.0), ("seconds_per_event", float("nan"))],
)
def test_other_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        replace(SMALL, **{name: value})
