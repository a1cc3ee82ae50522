"""Row 1: consumers of different pace, in any order of steps, reads and acknowledgements."""

import random
from dataclasses import dataclass, field

import torch
from tests.integration.trainer.torchrec_defects.copies import weights
from tests.integration.trainer.torchrec_defects.models import BAGS, ROWS, bags, sharded, train
from tests.integration.trainer.torchrec_defects.registry import scenario
from torchrec.distributed import DistributedModelParallel

from deltasync.trainer.tracking.delta import Token
from deltasync.trainer.tracking.modes import TrackingMode
from deltasync.trainer.tracking.options import TrackerOptions
from deltasync.trainer.tracking.tracker import Tracker

ACTIONS = 250
TABLE = f"{BAGS}.t"
# How often each reads, compared with the others.
PACES = {"fast": 12, "slow": 4, "slowest": 1}


@dataclass
class _Position:
    """How many steps a consumer has taken in, and what the table was then."""

    steps: int
    rows: torch.Tensor
    tokens: list[tuple[Token, int, torch.Tensor]] = field(default_factory=list)


class _Play:
    """A tracker, beside a plain list of what each step has changed."""

    def __init__(self, mode: TrackingMode, *, auto_compact: bool, delete_on_read: bool) -> None:
        self._model: DistributedModelParallel = sharded({"bags": bags("t")})
        self._delete_on_read = delete_on_read
        self._steps: list[set[int]] = []
        self._positions = {name: _Position(0, self._rows()) for name in PACES}
        self._tracker = Tracker(
            self._model,
            TrackerOptions(
                consumers=list(PACES), mode=mode, auto_compact=auto_compact, delete_on_read=delete_on_read
            ),
        )

    def step(self, choice: random.Random) -> None:
        ids = [choice.randrange(ROWS) for _ in range(choice.randrange(4))]
        train(self._model, t=ids)
        self._tracker.step()
        self._steps.append(set(ids))

    def read(self, name: str) -> None:
        position = self._positions[name]
        delta = self._tracker.get_delta(name)
        due = sorted(set().union(*self._steps[position.steps :]))
        found = delta.rows.get(TABLE)
        assert (found.ids.tolist() if found else []) == due
        now = self._rows()
        if found and found.values is not None and found.first is not None:
            assert torch.equal(found.values, now[due])
            assert torch.equal(found.first, position.rows[due])
        position.tokens.append((delta.token, len(self._steps), now))
        if self._delete_on_read:
            self._move(position, len(self._steps), now)

    def acknowledge(self, name: str, choice: random.Random) -> None:
        """Any of its tokens, also an older one: a position never moves back."""
        position = self._positions[name]
        if position.tokens:
            token, steps, rows = position.tokens.pop(choice.randrange(len(position.tokens)))
            self._tracker.acknowledge(token)
            self._move(position, steps, rows)

    def _move(self, position: _Position, steps: int, rows: torch.Tensor) -> None:
        if steps > position.steps:
            position.steps, position.rows = steps, rows

    def _rows(self) -> torch.Tensor:
        return weights(self._model)[TABLE]


@scenario(row=1)
def a_slow_consumer_is_given_all_that_faster_ones_were() -> None:
    choice = random.Random(1)
    for mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING):
        for auto_compact in (False, True):
            for delete_on_read in (False, True):
                _play(_Play(mode, auto_compact=auto_compact, delete_on_read=delete_on_read), choice)


def _play(play: _Play, choice: random.Random) -> None:
    for _ in range(ACTIONS):
        name = choice.choices(list(PACES), list(PACES.values()))[0]
        match choice.randrange(3):
            case 0:
                play.step(choice)
            case 1:
                play.read(name)
            case _:
                play.acknowledge(name, choice)
    for name in PACES:
        play.read(name)
