"""What acks say of what a replica holds."""

import numpy as np

from deltasync.feeds.frozen_release import FrozenRelease, Head
from deltasync.feeds.repair import NO_REPAIR, Repair
from deltasync.feeds.replica_audit import ReplicaAudit

RIGHT = {0: 10, 1: 20}
WRONG = {0: 11, 1: 20}


def sent(proof: ReplicaAudit, number: int, repair: Repair = NO_REPAIR, *, now: float = 0.0, end: int = 0) -> None:
    proof.expect(FrozenRelease(Head(number, number, 0, 0), repair=repair, checksums=(10, 20)), end, now)


def test_a_repair_is_due_until_it_was_sent() -> None:
    """It may be dropped before: the consumer was paused."""
    proof = ReplicaAudit()
    sent(proof, 1)
    proof.check(1, WRONG, 0)
    for _ in range(2):
        repair = proof.due_repair(0.0)
        assert repair.slots == {0}
    sent(proof, 1, repair)
    assert proof.due_repair(1e9).slots == frozenset()


def test_right_checksums_prove_it() -> None:
    proof = ReplicaAudit()
    sent(proof, 1)
    assert proof.check(1, RIGHT, 0) == frozenset()
    assert proof.due_repair(0.0).slots == frozenset()


def test_what_is_wrong_is_repaired_once() -> None:
    proof = ReplicaAudit()
    sent(proof, 1)
    assert proof.check(1, WRONG, 0) == {0}
    assert proof.due_repair(0.0).slots == {0}
    sent(proof, 1, Repair(frozenset({0})))
    assert proof.due_repair(0.0).slots == frozenset()
    assert proof.check(1, RIGHT, 0) == frozenset()
    assert proof.check(1, RIGHT, 0) == frozenset()


def test_what_was_sent_before_the_repair_asks_for_no_other() -> None:
    proof = ReplicaAudit()
    sent(proof, 1)
    sent(proof, 2)
    assert proof.check(1, WRONG, 0) == {0}
    assert proof.due_repair(0.0).slots == {0}
    sent(proof, 2, Repair(frozenset({0})))
    assert proof.check(2, WRONG, 0) == {0}
    assert proof.due_repair(0.0).slots == frozenset()
    assert proof.check(2, RIGHT, 0) == frozenset()


def test_an_ack_that_comes_while_the_repair_is_sent_asks_for_no_other() -> None:
    """A whole table takes a while."""
    proof = ReplicaAudit()
    sent(proof, 1)
    sent(proof, 2)
    assert proof.check(1, WRONG, 0) == {0}
    assert proof.due_repair(0.0).slots == {0}
    assert proof.check(2, WRONG, 0) == {0}
    sent(proof, 2, Repair(frozenset({0})))
    assert proof.due_repair(0.0).slots == frozenset()


def test_an_ack_that_is_repeated_while_the_repair_is_sent_proves_nothing() -> None:
    proof = ReplicaAudit()
    sent(proof, 1)
    assert proof.check(1, WRONG, 0) == {0}
    assert proof.check(1, RIGHT, 0) == {0}
    assert proof.due_repair(0.0).slots == {0}
    assert proof.check(1, RIGHT, 0) == {0}
    sent(proof, 1, Repair(frozenset({0})))
    assert proof.check(1, RIGHT, 0) == frozenset()


def test_a_repair_that_did_not_help_is_made_again_later() -> None:
    proof = ReplicaAudit()
    sent(proof, 1)
    assert proof.check(1, WRONG, 0) == {0}
    assert proof.due_repair(0.0).slots == {0}
    sent(proof, 1, Repair(frozenset({0})))
    assert proof.check(1, {0: 10, 1: 5}, 0) == {1}
    assert proof.due_repair(4.9).slots == frozenset()
    assert proof.due_repair(5.0).slots == {1}
    sent(proof, 1, Repair(frozenset({1})), now=5.0)
    assert proof.check(1, WRONG, 0) == {0}
    assert proof.due_repair(14.9).slots == frozenset()
    assert proof.due_repair(15.0).slots == {0}


def test_a_repair_that_helped_makes_the_next_one_immediate() -> None:
    proof = ReplicaAudit()
    for number in (1, 2):
        sent(proof, number)
        assert proof.check(number, WRONG, 0) == {0}
        assert proof.due_repair(0.0).slots == {0}
        sent(proof, number, Repair(frozenset({0})))
        assert proof.check(number, RIGHT, 0) == frozenset()


def test_an_ack_of_a_later_release_stands_for_those_before() -> None:
    proof = ReplicaAudit()
    for number in (1, 2, 3):
        sent(proof, number)
    assert proof.check(2, RIGHT, 0) == frozenset()
    assert proof.check(1, WRONG, 0) == frozenset()
    assert proof.check(3, WRONG, 0) == {0}


def test_an_ack_that_was_repeated_before_the_repair_arrived_is_none_of_the_repair() -> None:
    proof = ReplicaAudit()
    sent(proof, 1, end=100)
    assert proof.check(1, WRONG, 100) == {0}
    assert proof.due_repair(0.0).slots == {0}
    sent(proof, 1, Repair(frozenset({0})), end=150)
    for _ in range(3):
        proof.check(1, WRONG, 100)
    assert proof.due_repair(1e9).slots == frozenset()
    assert proof.check(1, RIGHT, 150) == frozenset()


def test_rows_that_the_replica_knows_to_be_damaged_are_sent_alone_and_the_table_if_that_did_not_help() -> None:
    proof, rows = ReplicaAudit(), {0: np.array([3, 7])}
    sent(proof, 1)
    assert proof.check(1, {0: 99, 1: 98}, 0, rows) == {0, 1}
    repair = proof.due_repair(0.0)
    assert repair.whole == {1}
    assert repair.rows == rows
    sent(proof, 1, repair)
    assert proof.check(1, WRONG, 0, rows) == {0}
    again = proof.due_repair(5.0)
    assert again.whole == {0}
    assert not again.rows
    sent(proof, 1, again)
    assert proof.check(1, RIGHT, 0) == frozenset()
    assert proof.check(1, WRONG, 0, rows) == {0}
    assert proof.due_repair(5.0).rows == rows, "it had helped"
