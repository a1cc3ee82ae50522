"""What the processes of a soak write down and leave, and what is done to their files."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.soak.faults.choice import NotDone
from tests.soak.faults.disk import fill_disk, flip_bit
from tests.soak.faults.operators import negative
from tests.soak.fuse import clock_file, shifted_clocks
from tests.soak.journal import Journal, of_pasts, read_journal
from tests.soak.leftovers import directory_bytes, leftovers, tracebacks
from tests.soak.plain_model import PlainModel
from tests.soak.rank import journal_file
from tests.soak.schedule import Fault
from tests.support import flips

from deltasync.core.position import Position


def test_a_journal_drops_half_a_line_and_writes_the_next_one_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    assert read_journal(file) == []
    file.write_text('{"step": 1}\n{"st')
    assert read_journal(file) == [{"step": 1}]
    journal = Journal(file)
    journal.append(step=2, deletes={"users": [3]})
    journal.close()
    assert read_journal(file) == [{"step": 1}, {"step": 2, "deletes": {"users": [3]}}]


def test_what_came_before_a_directory_was_put_back_by_hand_is_another_past() -> None:
    lines = [{"history": "h", "unix_ns": at, "version": at} for at in (1, 5, 6, 9)]
    assert [line["history"] for line in of_pasts(lines, [5, 8])] == ["h/0", "h/1", "h/1", "h/2"]
    assert [line["version"] for line in of_pasts(lines, [5, 8])] == [1, 5, 6, 9]
    assert {line["history"] for line in of_pasts(lines, [])} == {"h/0"}


LOG = """2026 INFO deltasync.events all is well
2026 ERROR deltasync.events it failed
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^

  File "b.py", line 2, in g
deltasync.base.errors.Damaged: a bit

2026 INFO deltasync.events on
"""


def test_the_last_line_of_each_traceback_is_found(tmp_path: Path) -> None:
    (tmp_path / "service.log").write_text(LOG)
    (tmp_path / "clicks-rank-0.log").write_text(LOG)
    (tmp_path / "whole.log").write_text("all is well\n")
    assert tracebacks(tmp_path) == ["service.log: deltasync.base.errors.Damaged: a bit"]


def test_files_of_checkpoints_belong_there_and_others_do_not(tmp_path: Path) -> None:
    flips.write(tmp_path / "data", checkpoints=[2, 3, 4])
    data_dir = tmp_path / "data"
    (data_dir / "endpoints.json").write_text("{}")
    assert leftovers(data_dir) == []
    lost = ["checkpoints/clicks/data/00000000000000000001-0123abcd-000000", "models"]
    for name in lost:
        (data_dir / name).write_bytes(bytes(10))
    assert leftovers(data_dir) == lost
    assert directory_bytes(data_dir) >= 4096


def test_one_bit_is_flipped_where_there_is_something(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(bytes(50))
    assert flip_bit(tmp_path, 0.5) == "nothing"
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "rows"
    for number in range(20):
        before = bytes(100) + b"\xff" * 10 + bytes(100)
        file.write_bytes(before)
        said = flip_bit(tmp_path, number / 20)
        [at] = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(file.read_bytes(), np.uint8))
        assert said == f"rows, byte {at}"
        assert 100 <= at < 110
        assert (before[at] ^ file.read_bytes()[at]).bit_count() == 1


def test_a_clock_is_off_while_a_file_says_so(tmp_path: Path) -> None:
    file = clock_file(tmp_path / "service.fuse")
    clocks = shifted_clocks(file, lambda: 1000.0, lambda: 1000 * 10**9)
    assert [clock() for clock in clocks] == [1000.0, 1000 * 10**9]
    file.write_text("-240.0")
    assert [clock() for clock in clocks] == [760.0, 760 * 10**9]
    file.unlink()
    assert [clock() for clock in clocks] == [1000.0, 1000 * 10**9]


def test_a_checkpoint_may_be_of_a_step_of_which_one_rank_was_told_nothing(tmp_path: Path) -> None:
    """It has gone on with the others, as the service was put back."""
    crew: Any = SimpleNamespace(folder=tmp_path, start=lambda *_: None, dismiss=lambda *_: None)
    model = PlainModel(crew, "pair", "service:1", ranks=2)
    for rank, steps in enumerate([(1, 3), (1, 2, 3)]):
        journal = Journal(journal_file(tmp_path, "pair", 0, rank))
        for step in steps:
            journal.append(step=step, version=step + 10, history="h", seal=step)
        journal.close()
    model.restart(behind=1)
    assert (model.runs[-1].first_step, model.runs[-1].held) == (3, Position("h", 12, 2))
    assert model.runs[-1].held.seal == 2


def test_a_figure_below_0_is_found_wherever_it_is() -> None:
    lag = {"state": "in sync", "rows": 0, "seconds": 1.5, "none": None, "replicas": [{"a": 1}, {"age": -0.1}]}
    assert list(negative(lag)) == ["/replicas/1/age"]
    assert not list(negative({"replicas": [], "rows": 3}))


@pytest.mark.parametrize("runs", [True, False])
def test_a_disk_that_another_fault_removed_cannot_be_full(tmp_path: Path, *, runs: bool) -> None:
    """Its process, or its directory, which is being put back."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    if not runs:
        (tmp_path / "log").mkdir()
        (tmp_path / "log" / "data.mdb").write_bytes(b"12")
    crew = SimpleNamespace(pid=lambda _: os.getpid() if runs else ended.pid)
    world: Any = SimpleNamespace(data_dir=tmp_path, crew=crew)
    with pytest.raises(NotDone, match="away"):
        fill_disk(world, Fault(0.0, "disk full", 0.0, 0.0))
