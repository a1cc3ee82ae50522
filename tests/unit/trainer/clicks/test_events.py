import numpy as np
import pytest

from deltasync.trainer.clicks.events import Events, concatenate


def events(n: int, start: int = 0) -> Events:
    index = np.arange(start, start + n, dtype=np.int64)
    return Events(index=index, user=index, item=index, timestamp=index, label=np.zeros(n, dtype=np.float32))


def test_take_keeps_the_arrays_together() -> None:
    part = events(10).take(slice(3, 6))
    assert len(part) == 3
    assert part.user.tolist() == part.index.tolist() == [3, 4, 5]
    assert part.label.shape == (3,)


def test_concatenate_keeps_the_order() -> None:
    joined = concatenate([events(2), events(0), events(3, start=2)])
    assert joined.item.tolist() == [0, 1, 2, 3, 4]
    assert joined.label.dtype == np.float32


@pytest.mark.parametrize("label", [np.zeros(2, np.float32), np.zeros((3, 1), np.float32)])
def test_arrays_must_fit_together(label: np.ndarray) -> None:
    index = np.arange(3)
    with pytest.raises(ValueError, match="label"):
        Events(index=index, user=index, item=index, timestamp=index, label=label)
