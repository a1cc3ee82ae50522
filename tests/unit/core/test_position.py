"""Whether a replica can go on from a position, and whether that is of a past that was discarded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.seals import sealed

from deltasync.core.position import NOWHERE, Position, can_continue, is_discarded, line_of, next_epoch, reaches
from deltasync.core.seal import SealHistory

KEPT = 4  # Seals of a history.


@pytest.mark.parametrize(
    ("held", "seal", "acknowledged", "yes", "said"),
    [
        (Position("h", 3, 7), 7, NOWHERE, True, "version 3"),
        (Position("h.1", 3, 7), 7, NOWHERE, True, "version 3"),
        (Position("h", 3, 7), 8, NOWHERE, False, "which is not in the service's history"),
        (Position("h", 3, 7), 8, Position("h", 3, 7), False, "not in the service's history"),
        (Position("h", 3, 7), 0, Position("h", 3, 7), True, "version 3"),
        (Position("h.1", 3, 7), 0, Position("h", 3, 7), True, "version 3"),
        (Position("h", 3, 7), 0, NOWHERE, False, "which is too old to compare with the service's history"),
        (Position("h", 3, 7), 0, Position("h", 3, 8), False, "too old to compare"),
        (Position("h", 3, 7), 0, Position("h", 4, 7), False, "too old to compare"),
        (Position("h", 3, 7), 0, Position("x", 3, 7), False, "too old to compare"),
        (Position("h", 3), 8, NOWHERE, True, "version 3"),
        (Position("h", 3), 0, NOWHERE, True, "version 3"),
        (Position("h", 6, 7), 0, NOWHERE, False, "but the newest is 5"),
        (Position("h", 6, 7), 0, Position("h", 6, 7), False, "but the newest is 5"),
        (Position("x", 3), 0, NOWHERE, False, "history x, the service history h"),
        (Position("x", 3, 7), 8, NOWHERE, False, "history x, the service history h"),
        (Position("x", 3, 7), 7, NOWHERE, True, "version 3"),
        (Position("h", 0), 0, NOWHERE, False, "holds nothing"),
    ],
)
def test_from_which_positions_a_replica_goes_on(
    held: Position, seal: int, acknowledged: Position, yes: bool, said: str
) -> None:
    decision = can_continue(held, "h", 5, seal, acknowledged=acknowledged)
    assert decision.yes is yes
    assert said in decision.reason


@pytest.mark.parametrize(
    ("held", "seal", "discarded"),
    [
        (Position("h", 3, 7), 8, True),
        (Position("h.1", 3, 7), 8, True),
        (Position("h.1", 3, 7), 7, False),
        (Position("h", 6, 7), 0, True),
        (Position("h.1", 6), 0, True),
        (Position("x", 3), 8, True),
        (Position("h", 3), 8, False),
        (Position("h", 3, 7), 0, False),  # Older than the seals that are known.
        (NOWHERE, 0, False),
    ],
)
def test_which_positions_are_of_a_discarded_past(held: Position, seal: int, discarded: bool) -> None:
    assert is_discarded(held, "h", 5, seal) is discarded


def test_epochs_of_a_history_are_of_one_line() -> None:
    first = next_epoch("h")
    second = next_epoch(first)
    assert len({"h", first, second}) == 3
    assert line_of(first) == line_of(second) == "h"


@dataclass
class Service:
    """What a data directory has: rows with stamps, the seals of the last versions, and offsets."""

    history: str = "h"
    seals: SealHistory = field(default_factory=lambda: SealHistory(maxlen=KEPT))
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # Value and stamp, by id.
    offsets: dict[str, Position] = field(default_factory=dict)

    def publish(self, row: int, value: int) -> None:
        version = self.seals.newest_version + 1
        self.rows[row] = (value, version)
        self.seals.append(replace(sealed(version), sealed_unix_ns=value).after(self.seals.newest))

    @property
    def head(self) -> Position:
        version = self.seals.newest_version
        return Position(self.history, version, self.seals.checksum_of(version))

    def copy(self) -> "Service":
        return Service(self.history, SealHistory(self.seals, KEPT), dict(self.rows), dict(self.offsets))


@dataclass
class Client:
    """A replica's process, which may be of before seals."""

    name: str
    shows_seals: bool
    held: Position = NOWHERE
    rows: dict[int, int] = field(default_factory=dict)

    def follow(self, service: Service) -> bool:
        """Take what it lacks; whether it went on from what it held."""
        held = self.held if self.shows_seals else replace(self.held, seal=0)
        known = service.seals.checksum_of(held.number)
        acknowledged = service.offsets.get(self.name, NOWHERE)
        decision = can_continue(held, service.history, service.head.number, known, acknowledged=acknowledged)
        if not decision.yes:
            self.rows = {}
        after = held.number if decision.yes else 0
        self.rows |= {row: value for row, (value, stamp) in service.rows.items() if stamp > after}
        self.held = service.offsets[self.name] = service.head
        return decision.yes


@dataclass(frozen=True)
class Phase:
    """What comes after a copy was put back, or restored: each publish with who follows then (2 = nobody)."""

    copy: int
    by_hand: bool
    publishes: Sequence[tuple[int, int]]


FOLLOWERS = st.sampled_from([0, 1, *[2] * 8])
PUBLISHES = st.lists(st.tuples(st.integers(0, 3), FOLLOWERS), min_size=KEPT, max_size=3 * KEPT)
PHASES = st.lists(st.builds(Phase, st.integers(0, 9), st.booleans(), PUBLISHES), min_size=2, max_size=4)


def _play(phases: Sequence[Phase], clients: Sequence[Client], *, by_hand: bool) -> Service:
    """Copies are taken after each publish."""
    copies, value = [Service()], 0
    service = copies[0].copy()
    for phase in phases:
        service = copies[-1 - phase.copy % len(copies)].copy()
        if not (by_hand and phase.by_hand):
            service.history = next_epoch(service.history)
        offsets = service.offsets.items()
        service.offsets = {name: replace(offset, history=service.history) for name, offset in offsets}
        for row, follower in phase.publishes:
            value += 1
            service.publish(row, value)
            for client in clients[follower : follower + 1]:
                client.follow(service)
            copies.append(service.copy())
    return service


@given(PHASES)
def test_whoever_goes_on_with_a_seal_holds_what_the_service_has(phases: list[Phase]) -> None:
    """Whatever was copied, put back and restored, and also where its seal is no longer kept."""
    clients = [Client(name, shows_seals=True) for name in "ab"]
    service = _play(phases, clients, by_hand=True)
    for client in clients:
        client.follow(service)
        assert client.rows == {row: value for row, (value, _) in service.rows.items()}


@given(PHASES)
def test_whoever_goes_on_without_a_seal_does_after_restores(phases: list[Phase]) -> None:
    clients = [Client("a", shows_seals=True), Client("old", shows_seals=False)]
    service = _play(phases, clients, by_hand=False)
    for client in clients:
        client.follow(service)
        assert client.rows == {row: value for row, (value, _) in service.rows.items()}


@given(st.integers(1, 3 * KEPT), st.integers(0, 3 * KEPT), st.booleans())
def test_nobody_is_sent_everything_without_reason(before: int, after: int, restored: bool) -> None:
    """Who was away for long has an offset; who has none, a seal that is still kept, or nothing to go by."""
    known, forgotten = Client("known", shows_seals=True), Client("forgotten", shows_seals=True)
    service = Service()
    for value in range(before):
        service.publish(value, value)
    for client in (known, forgotten):
        client.follow(service)
    del service.offsets["forgotten"]
    for value in range(after):
        service.publish(value, 100 + value)
    if restored:
        service.history = next_epoch(service.history)
        service.offsets = {"known": replace(service.offsets["known"], history=service.history)}
    assert known.follow(service)
    assert forgotten.follow(service) is (after < KEPT)


@pytest.mark.parametrize(
    ("held", "wanted", "yes"),
    [
        (Position("h", 5, 9), Position("h", 5, 9), True),
        (Position("h", 5), Position("h", 5, 9), True),
        (Position("h", 6, 1), Position("h", 5, 9), True),
        (Position("h", 4), Position("h", 5), False),
        (Position("h", 5, 8), Position("h", 5, 9), False),  # Of a past that was discarded.
        (Position("h.1", 5, 9), Position("h", 5, 9), True),  # The same past, restored.
        (Position("h.1", 6, 1), Position("h", 5, 9), False),
        (Position("h.1", 5), Position("h", 5), False),
    ],
)
def test_a_held_position_reaches_earlier_ones_of_its_history(held: Position, wanted: Position, yes: bool) -> None:
    assert reaches(held, wanted) is yes
