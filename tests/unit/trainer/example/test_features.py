import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.trainer.example.features import Features, Featurizer
from deltasync.trainer.example.options import RAW_IDS, ModelOptions
from deltasync.trainer.example.stream import EVENT, Events

ROOMY = ModelOptions(users=100, items=100, cross_buckets=1000)
TIGHT = ModelOptions(users=3, items=2, cross_buckets=5)

Row = tuple[int, int, int, int]


def events(rows: Sequence[Row]) -> Events:
    """Events of (user, item, timestamp, label) rows."""
    return np.array([(index, *row) for index, row in enumerate(rows)], EVENT)


def flat(parts: Sequence[Features]) -> dict[str, np.ndarray]:
    names = ("index", "label", "dense", "history", "history_lengths")
    arrays = {name: [getattr(part, name) for part in parts] for name in names}
    arrays |= {f"ids.{key}": [part.ids[key] for part in parts] for key in parts[0].ids}
    return {name: np.concatenate(pieces) for name, pieces in arrays.items()}


def histories(features: Features) -> list[list[int]]:
    ends = np.cumsum(features.history_lengths)
    return [part.tolist() for part in np.split(features.history, ends)[:-1]]


rows = st.tuples(
    st.sampled_from([5, 6, 7, 8, 2**63 - 1]), st.integers(0, 3), st.integers(0, 2**33), st.integers(0, 1)
)
streams = st.lists(rows, min_size=1, max_size=40)


@given(stream=streams, cuts=st.lists(st.floats(0, 1), max_size=5), options=st.sampled_from([ROOMY, TIGHT]))
def test_features_do_not_depend_on_cuts(stream: list[Row], cuts: list[float], options: ModelOptions) -> None:
    """So they carry over from call to call, and do not depend on later events."""
    whole = events(stream)
    bounds = [0, *sorted(round(cut * len(stream)) for cut in cuts), len(stream)]
    featurizer = Featurizer(options)
    parts = [featurizer.features(whole[slice(*pair)]) for pair in itertools.pairwise(bounds)]
    once, cut = flat([Featurizer(options).features(whole)]), flat(parts)
    for name, array in once.items():
        np.testing.assert_array_equal(cut[name], array, err_msg=name, strict=True)


@given(stream=streams)
def test_features_do_not_contain_the_own_label(stream: list[Row]) -> None:
    *rest, (user, item, timestamp, label) = stream
    one = flat([Featurizer(TIGHT).features(events(stream))])
    other = flat([Featurizer(TIGHT).features(events([*rest, (user, item, timestamp, 1 - label)]))])
    del one["label"]
    for name, array in one.items():
        np.testing.assert_array_equal(other[name], array, err_msg=name)


@given(stream=streams)
def test_counts_and_history_match_a_plain_count(stream: list[Row]) -> None:
    features = Featurizer(ROOMY).features(events(stream))
    of_user: dict[int, int] = defaultdict(int)
    of_item: dict[int, int] = defaultdict(int)
    liked: dict[int, list[int]] = defaultdict(list)
    item_rows = {item: row for row, item in enumerate(dict.fromkeys(item for _, item, _, _ in stream))}
    for n, (user, item, _, label) in enumerate(stream):
        expected = [math.log1p(of_user[user]), math.log1p(of_item[item])]
        assert features.dense[n, :2].tolist() == pytest.approx(expected)
        assert histories(features)[n] == liked[user][-5:]
        of_user[user] += 1
        of_item[item] += 1
        liked[user] += [item_rows[item]] * label


def test_a_full_table_hashes_further_ids_and_keeps_the_old_ones() -> None:
    featurizer = Featurizer(ModelOptions(users=8, items=8, cross_buckets=10))
    many = events([(user, 0, 0, 0) for user in range(1000)])
    first, again = featurizer.features(many).ids["user"], featurizer.features(many).ids["user"]
    np.testing.assert_array_equal(first, again)
    assert first[:8].tolist() == list(range(8))
    assert np.bincount(first[8:], minlength=8).min() > 80


def test_raw_ids_are_spread_and_the_same_in_every_feature() -> None:
    stream = events([(user, user % 30, 0, 1) for user in range(60)] * 2)
    found = Featurizer(replace(ROOMY, managed=True)).features(stream)
    rows = Featurizer(ROOMY).features(stream)
    for key, number in {"user": 60, "item": 30}.items():
        ids = found.ids[key]
        assert len(np.unique(ids)) == number
        np.testing.assert_array_equal(ids[:60], ids[60:])
        assert 0 <= ids.min() < RAW_IDS // 8
        assert RAW_IDS - RAW_IDS // 8 < ids.max() < RAW_IDS
    by_row = dict(zip(rows.ids["item"].tolist(), found.ids["item"].tolist(), strict=True))
    assert found.history.tolist() == [by_row[row] for row in rows.history.tolist()]
    for key in ("cross", "hour"):
        np.testing.assert_array_equal(found.ids[key], rows.ids[key])
