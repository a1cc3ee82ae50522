"""Scenarios, each for a row of the table of defects in TorchRec's tracker, and how a rank plays them."""

import faulthandler
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from textwrap import shorten
from traceback import TracebackException

import pytest
import torch
import torch.distributed as dist

# A rank whose scenario has failed leaves the other alone in a collective for so long.
ALONE_SECONDS = 30
# A rank that hangs for longer, not in a collective, ends and shows where it was.
LONGEST_SECONDS = 60


@dataclass(frozen=True)
class Scenario:
    row: int
    ranks: int
    play: Callable[[], None]

    @property
    def id(self) -> str:
        return f"row{self.row:02}-{self.play.__name__}"


SCENARIOS: list[Scenario] = []


def scenario(row: int, *, ranks: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What must hold where TorchRec's tracker has the defect of this row; on so many ranks."""

    def register(play: Callable[[], None]) -> Callable[[], None]:
        SCENARIOS.append(Scenario(row, ranks, play))
        return play

    return register


def in_order() -> list[Scenario]:
    return sorted(SCENARIOS, key=lambda one: one.row)


def play_all(ranks: int) -> Iterator[tuple[str, str]]:
    """The id of each scenario for so many ranks, and how it failed here: "" if it did not.

    Those after one that left a rank alone in a collective are not played.
    """
    together = dist.new_group(timeout=timedelta(seconds=LONGEST_SECONDS))
    for one in in_order():
        if one.ranks != ranks:
            continue
        failure, alone = _play(one)
        yield one.id, failure
        anyone_alone = torch.tensor(int(alone))
        dist.all_reduce(anyone_alone, group=together)
        if anyone_alone:
            return


def _play(one: Scenario) -> tuple[str, bool]:
    torch.manual_seed(one.row)
    faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
    try:
        one.play()
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # told, and the next one is played
        return _told(error), one.ranks > 1 and type(error) is RuntimeError
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "", False


def _told(error: BaseException) -> str:
    """Its traceback, with what the last function called knew: assertions do not show their values here."""
    told = "".join(TracebackException.from_exception(error).format())
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    known = last.tb_frame.f_locals.items() if last else ()
    return told + "".join(f"{name} = {shorten(str(value), 300)}\n" for name, value in known)
