"""Scenarios that ranks run together, each as a separate test.

Starting ranks takes longer than most scenarios, so one start runs many of them.
"""

import faulthandler
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from traceback import TracebackException
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import run_ranks

# A rank whose scenario has failed leaves the other alone in a collective for so long.
ALONE_SECONDS = 30
# A rank that hangs for longer, not in a collective, ends and shows where it was.
LONGEST_SECONDS = 60
# One run plays so many at most.
MANY = 80


@dataclass(frozen=True)
class Scenario:
    topic: str
    ranks: int
    play: Callable[[], None]
    nightly: bool = False

    @property
    def id(self) -> str:
        return f"{self.topic}-{self.play.__name__}"


class Scenarios:
    """The scenarios of a package, which defines them as `SCENARIOS`.

    Args:
        package: its name.
        one_by_day: by day only run the first scenario of each topic, at night all of them.
    """

    def __init__(self, package: str, *, one_by_day: bool = False) -> None:
        self._package, self._one_by_day = package, one_by_day
        self._all: list[Scenario] = []

    def __iter__(self) -> Iterator[Scenario]:
        return iter(sorted(self._all, key=lambda one: one.topic))

    def scenario(
        self, topic: str, *, ranks: int, nightly: bool = False
    ) -> Callable[[Callable[[], None]], Callable[[], None]]:
        """Register a scenario for this number of ranks; one that takes long is `nightly`."""

        def register(play: Callable[[], None]) -> Callable[[], None]:
            self._all.append(Scenario(topic, ranks, play, nightly))
            return play

        return register

    def of(self, ranks: int) -> list[Scenario]:
        return [one for one in self if one.ranks == ranks]

    def by_day(self, ranks: int) -> list[Scenario]:
        """The scenarios for a number of ranks that every test run includes."""
        short = [one for one in self.of(ranks) if not one.nightly]
        return list({one.topic: one for one in reversed(short)}.values()) if self._one_by_day else short

    def played(self, folder: Path, ranks: int) -> "Outcomes":
        """Run the scenarios for a number of ranks in a folder."""
        by_day = self.by_day(ranks)
        at_night = [one for one in self.of(ranks) if one not in by_day]
        shares = [some[first : first + MANY] for some in (by_day, at_night) for first in range(0, len(some), MANY)]
        return Outcomes(self._package, folder, shares)


class Outcomes:
    """The outcomes of scenarios. Starts ranks for a share of the scenarios when the first of them is needed."""

    def __init__(self, package: str, folder: Path, shares: list[list[Scenario]]) -> None:
        self._package, self._folder, self._shares = package, folder, shares
        # On each rank: "" if it did not fail, missing if it was not played.
        self._ends: dict[int, list[dict[str, str]]] = {}

    def check(self, scenario: Scenario) -> None:
        share = next(number for number, share in enumerate(self._shares) if scenario in share)
        if share not in self._ends:
            self._ends[share] = self._play(self._folder / str(share), self._shares[share])
        ends = [one.get(scenario.id, "not played: an earlier one left a rank alone") for one in self._ends[share]]
        if any(ends):
            pytest.fail(
                "\n".join(f"rank {rank}: {end or 'passed'}" for rank, end in enumerate(ends)), pytrace=False
            )

    def _play(self, folder: Path, share: list[Scenario]) -> list[dict[str, str]]:
        folder.mkdir()
        names, ranks = [one.id for one in share], share[0].ranks
        run_ranks("-m", "tests.support.scenario_ranks", self._package, str(folder), *names, ranks=ranks)
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def parametrized(scenarios: Scenarios, ranks: int) -> pytest.MarkDecorator:
    """Parametrise a test over all scenarios for a number of ranks."""
    by_day = scenarios.by_day(ranks)
    return pytest.mark.parametrize(
        "scenario",
        [
            pytest.param(one, id=one.id, marks=() if one in by_day else pytest.mark.nightly)
            for one in scenarios.of(ranks)
        ],
    )


def play_all(scenarios: list[Scenario]) -> Iterator[tuple[str, str]]:
    """The id of each scenario, and its error on this rank; "" if it passed.

    Skips the scenarios after one that left a rank alone in a collective.
    """
    together = dist.new_group(timeout=timedelta(seconds=LONGEST_SECONDS))
    for one in scenarios:
        failure, alone = _play(one)
        yield one.id, failure
        anyone_alone = torch.tensor(int(alone))
        dist.all_reduce(anyone_alone, group=together)
        if anyone_alone:
            return


def _play(one: Scenario) -> tuple[str, bool]:
    torch.manual_seed(crc32(one.topic.encode()))
    faulthandler.dump_traceback_later(LONGEST_SECONDS, exit=True)
    try:
        one.play()
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # told, and the next one is played
        return _told(error), one.ranks > 1 and type(error) is RuntimeError
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "", False


def _told(error: BaseException) -> str:
    """The traceback, with local variables of the last function, because assertions do not show values here."""
    told = "".join(TracebackException.from_exception(error).format())
    last = error.__traceback__
    while last and last.tb_next:
        last = last.tb_next
    known = last.tb_frame.f_locals.items() if last else ()
    return told + "".join(f"{name} = {shorten(str(value), 300)}\n" for name, value in known)
