import numpy as np

from deltasync.trainer.clicks.hashing import hash_to, splitmix64


def test_splitmix64_gives_the_published_sequence() -> None:
    gamma, seed = 0x9E3779B97F4A7C15, 1234567
    states = np.array([(seed + gamma * n) % 2**64 for n in range(3)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_hash_to_is_fixed_in_range_and_ordered() -> None:
    one, other = np.arange(1000), np.arange(1000)[::-1]
    buckets = hash_to(7, one, other)
    assert buckets.min() >= 0
    assert buckets.max() < 7
    assert buckets.dtype == np.int64
    assert not np.array_equal(buckets, hash_to(7, other, one))
