"""Waiting for a part of another rank: counted in time, from when it began."""

from deltasync.trainer.standstill import Standstill


def test_it_is_long_after_a_minute_without_an_end() -> None:
    now = [0.0]
    standstill = Standstill(lambda: now[0])
    standstill.note(waits=True)
    now[0] = 59.0
    standstill.note(waits=True)
    assert not standstill.long
    now[0] = 60.0
    assert standstill.long
    standstill.note(waits=False)
    assert not standstill.long
    standstill.note(waits=True)
    assert not standstill.long
