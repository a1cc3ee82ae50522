"""The verdict names every row that differs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.soak.journal import Journal
from tests.soak.lineage import TrainingRun
from tests.soak.rank import journal_file
from tests.soak.stores import KEYS, TOLD
from tests.soak.training import FIRST_TABLES
from tests.soak.verdict import Trained, trained_plain, twice_acknowledged, unequal

from deltasync.core.policy import Policy

RUN = TrainingRun(number=0, id="m-0", started_unix_ns=1, first_step=1, ranks=1, tables=FIRST_TABLES)
STEPS = 14


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    acknowledge(tmp_path, RUN, range(1, STEPS + 1))
    return trained_plain(tmp_path, "m", [RUN])


def acknowledge(folder: Path, run: TrainingRun, steps: range, *, first_version: int = 1) -> None:
    journal = Journal(journal_file(folder, "m", run.number, 0))
    for version, step in enumerate(steps, first_version):
        journal.append(step=step, version=version, history="h", seal=version, unix_ns=step, again=0)
    journal.close()


def whole(trained: Trained) -> dict[str, Any]:
    return {name: rows.copy() for name, rows in trained.rows.items()}


def test_the_same_rows_are_equal_and_one_other_bit_is_not(trained: Trained) -> None:
    held = whole(trained)
    assert not unequal(trained, Policy(), held)
    held["items"].view("<u4")[7, 3] ^= 1
    assert unequal(trained, Policy(), held) == {"items": 1}


def test_a_table_that_is_missing_counts_whole(trained: Trained) -> None:
    held = whole(trained)
    del held["tags"]
    assert unequal(trained, Policy(), held) == {"tags": FIRST_TABLES["tags"]}
    assert unequal(trained, Policy(), {}) == dict(FIRST_TABLES)


def test_rows_are_compared_as_the_policy_sends_them(trained: Trained) -> None:
    policy = Policy.from_dict({"value_type": "int8"})
    assert set(unequal(trained, policy, whole(trained))) == {"users", "items"}
    assert set(unequal(trained, Policy(tables=("users",)), whole(trained))) == {"items", "tags"}


def by_key(trained: Trained) -> dict[str, Any]:
    assert trained.training
    held: dict[str, Any] = {}
    for name, there in trained.training.tables.there.items():
        held[KEYS + name] = np.flatnonzero(there)
        held[name] = trained.rows[name][there]
    return held


def test_a_store_by_key_has_all_keys_but_the_deleted_ones(trained: Trained) -> None:
    assert trained.training
    users = KEYS + "users"
    assert not unequal(trained, Policy(), by_key(trained))
    lacking = by_key(trained)
    lacking[users], lacking["users"] = lacking[users][1:], lacking["users"][1:]
    assert unequal(trained, Policy(), lacking)[users] == 1
    serving = by_key(trained)
    deleted = int(np.flatnonzero(~trained.training.tables.there["users"])[0])
    at = int(np.searchsorted(serving[users], deleted))
    serving[users] = np.insert(serving[users], at, deleted)
    serving["users"] = np.insert(serving["users"], at, 0, axis=0)
    assert unequal(trained, Policy(), serving) == {users: 1}
    beyond = by_key(trained)
    beyond[KEYS + "tags"][-1] = FIRST_TABLES["tags"]
    assert KEYS + "tags" in unequal(trained, Policy(), beyond)


def test_ids_are_told_with_the_version_of_their_last_change_or_later(trained: Trained) -> None:
    policy = Policy.from_dict({"mode": "ids"})
    held = {TOLD + name: np.full(rows, STEPS) for name, rows in FIRST_TABLES.items()}
    assert not unequal(trained, policy, held)
    assert trained.training
    last = int(np.flatnonzero(trained.training.changed_at["users"][:, 1] == STEPS)[0])
    held[TOLD + "users"][last] = STEPS - 1
    assert unequal(trained, policy, held) == {"users": 1}


def test_a_version_that_was_acknowledged_twice_is_lost(tmp_path: Path) -> None:
    acknowledge(tmp_path, RUN, range(1, 11))
    second = replace(RUN, number=1, id="m-1", first_step=9)
    acknowledge(tmp_path, second, range(9, 12), first_version=11)
    assert twice_acknowledged(tmp_path, "m", [RUN, second]) == 0
    third = replace(RUN, number=2, id="m-2", first_step=12)
    acknowledge(tmp_path, third, range(12, 14), first_version=13)
    assert twice_acknowledged(tmp_path, "m", [RUN, second, third]) == 1


def test_versions_of_before_a_directory_was_put_back_by_hand_are_no_more(tmp_path: Path) -> None:
    acknowledge(tmp_path, RUN, range(1, 11))
    second = replace(RUN, number=1, id="m-1", first_step=11)
    acknowledge(tmp_path, second, range(11, 13), first_version=8)
    runs = [RUN, second]
    assert twice_acknowledged(tmp_path, "m", runs) == 2
    assert twice_acknowledged(tmp_path, "m", runs, [11]) == 0
    assert twice_acknowledged(tmp_path, "m", runs, [12]) == 1
    versions = trained_plain(tmp_path, "m", runs, [11]).versions
    assert versions == {(1, 11): 8, (1, 12): 9}
