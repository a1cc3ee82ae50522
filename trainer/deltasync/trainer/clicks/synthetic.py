"""A seeded, endless stream of clicks whose popular items and their appeal drift with time."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltasync.trainer.checks import check_positive, check_whole
from deltasync.trainer.clicks.events import Events

_WORLD, _BLOCK = 0, 1

# Chosen for a best possible AUC near 0.84, of which a fresh model gets far more than a stale one.
_QUALITY, _INCLINATION, _AFFINITY, _OFFSET = 1.8, 0.8, 0.5, -0.4  # what moves the log-odds of a click


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """What the stream is drawn from; equal options give equal streams, and every field changes the stream."""

    seed: int = 0
    users: int = 20_000
    items: int = 10_000
    block: int = 8192
    """Events drawn at once; each block has a random generator of its own."""
    factors: int = 8
    """Length of the latent vectors of users and items."""
    turnover: int = 1_000_000
    """Events during which popularity moves once over all items."""
    quality_period: int = 250_000
    """Events in which the quality of an item rises and falls once, on average over the items."""
    start_unix: int = 1_700_000_000
    """Unix second of the first event."""
    seconds_per_event: float = 30.0

    def __post_init__(self) -> None:
        for name in ("users", "items", "block", "factors", "turnover", "quality_period"):
            check_whole(name, getattr(self, name))
        for name in ("seed", "start_unix"):
            check_whole(name, getattr(self, name), least=0)
        check_positive("seconds_per_event", self.seconds_per_event)


def synthetic_events(options: SyntheticOptions) -> Iterator[Events]:
    """Yield the endless stream in blocks of `options.block` events."""
    world = ClickWorld(options)
    return (world.block(number) for number in itertools.count())


class ClickWorld:
    """The users, the items and the law by which users click: the same wherever the options are equal."""

    def __init__(self, options: SyntheticOptions) -> None:
        self._options = options
        rng = _generator(options.seed, _WORLD)
        self._tastes = rng.normal(size=(options.users, options.factors)).astype(np.float32)
        self._traits = rng.normal(size=(options.items, options.factors)).astype(np.float32)
        self._inclination = rng.normal(0.0, _INCLINATION, options.users)
        self._phase = rng.uniform(0.0, 2 * np.pi, options.items)
        self._frequency = 2 * np.pi * rng.uniform(0.5, 1.5, options.items) / options.quality_period
        self._user_shares = _zipf_shares(options.users, exponent=1.0, shift=20.0)
        self._rank_shares = _zipf_shares(options.items, exponent=1.3, shift=5.0)

    def block(self, number: int) -> Events:
        """Return block `number` (from 0) of the stream."""
        options, rng = self._options, _generator(self._options.seed, _BLOCK, number)
        index = np.arange(options.block, dtype=np.int64) + number * options.block
        user = _draw(rng, self._user_shares, options.block)
        item = self._popular_items(rng, index)
        clicked = rng.random(options.block) < self._probability(index, user, item)
        return Events(
            index=index,
            user=user,
            item=item,
            timestamp=options.start_unix + (index * options.seconds_per_event).astype(np.int64),
            label=clicked.astype(np.float32),
        )

    def probability(self, events: Events) -> NDArray[np.float64]:
        """Return the true probability of a click for each event of this stream, [n]: the best prediction."""
        return self._probability(events.index, events.user, events.item)

    def _popular_items(self, rng: np.random.Generator, index: NDArray[np.int64]) -> NDArray[np.int64]:
        rank = _draw(rng, self._rank_shares, index.size)
        # Even ranks lie ahead of the most popular item, odd ones behind it: items rise before they fade.
        distance = np.where(rank % 2 == 0, rank // 2, -(rank // 2) - 1)
        centre = index * self._options.items // self._options.turnover
        return (centre + distance) % self._options.items

    def _probability(
        self, index: NDArray[np.int64], user: NDArray[np.int64], item: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        quality = _QUALITY * np.sin(self._phase[item] + self._frequency[item] * index)
        affinity = np.einsum("nf,nf->n", self._tastes[user], self._traits[item])
        affinity *= _AFFINITY / np.sqrt(self._options.factors)
        logit = quality + self._inclination[user] + affinity + _OFFSET
        return np.asarray(1.0 / (1.0 + np.exp(-logit)))


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def _zipf_shares(count: int, *, exponent: float, shift: float) -> NDArray[np.float64]:
    """Return the cumulative shares of `count` ranks whose weight is (rank + shift) ** -exponent, [count]."""
    weights = (np.arange(count) + shift) ** -exponent
    return np.asarray(np.cumsum(weights) / weights.sum())


def _draw(rng: np.random.Generator, shares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Draw `count` ranks, [count]; the last share may have been rounded below 1, hence the bound."""
    return np.minimum(np.searchsorted(shares, rng.random(count), side="right"), shares.size - 1)
