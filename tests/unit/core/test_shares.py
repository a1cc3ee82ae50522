"""Work in shares is done once for each row."""

import threading

import numpy as np
import pytest

from deltasync.core import shares
from deltasync.core.shares import in_shares


@pytest.mark.parametrize("rows", [0, 1, 65_535, 65_536, 131_072, 400_001])
def test_each_row_is_in_one_share(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_cores", lambda: 3)
    done, some = np.zeros(rows, np.int64), list[slice]()

    def work(share: slice) -> None:
        done[share] += 1
        some.append(share)

    in_shares(work, rows)
    assert (done == 1).all()
    assert len(some) == max(1, min(rows // 65_536, 3))


def test_on_one_core_there_is_one_share_on_the_thread_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_cores", lambda: 1)
    threads = list[threading.Thread]()
    in_shares(lambda _: threads.append(threading.current_thread()), 1 << 20)
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_share_has_raised_is_raised_once_the_others_are_done(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_cores", lambda: 2)
    done = list[slice]()

    def work(share: slice) -> None:
        if (share.start > 0) == failing:
            raise MemoryError("no room")
        done.append(share)

    with pytest.raises(MemoryError, match="no room"):
        in_shares(work, 1 << 20)
    assert len(done) == 1
