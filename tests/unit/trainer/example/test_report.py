"""The demo's report, from the files that its processes write."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from deltasync.trainer.example.options import StreamOptions
from deltasync.trainer.example.poison import PoisonReport
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.report import build_report
from deltasync.trainer.example.results import Tables, write_arrays
from deltasync.trainer.example.run import DemoOptions

OPTIONS = DemoOptions(stream=StreamOptions(events=8))
REPLICAS = ("a", "b")
LABEL = np.array([0, 1, 0, 1, 0, 1, 1, 0], np.float32)
WEIGHT = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of two ranks and two replicas: the trainer and fresh replicas are right, a frozen one is wrong."""
    for rank in range(2):
        facts = {
            "tables": [("t", 4, 2, "<f4")],
            "shards": [("t", 2 * rank, 0)],
            "parameters": [],
            "steps": 4,
            "versions": 2,
            "rows": 10,
            "bytes": 100,
        }
        (tmp_path / f"trainer-{rank}.json").write_text(json.dumps(facts))
        write_arrays(tmp_path, f"tables-trainer-{rank}", {"shard0": WEIGHT[2 * rank : 2 * rank + 2]})
        mine = np.arange(rank, 8, 2)
        scores: Tables = {"index": mine, "logit": LABEL[mine], "label": LABEL[mine]}
        write_arrays(tmp_path, f"scores-trainer-{rank}", scores)
    for name in REPLICAS:
        write_replica(tmp_path, name, {"t": WEIGHT})
    return tmp_path


def write_replica(folder: Path, name: str, tables: Tables) -> None:
    write_arrays(folder, f"tables-{name}", tables)
    scores: Tables = {"index": np.arange(8), "logit": LABEL, "frozen": -LABEL, "label": LABEL}
    write_arrays(folder, f"scores-{name}", scores)
    (folder / f"{name}.json").write_text(json.dumps([(0, 900.0, 32), (2, 0.1, 30), (4, 0.3, 20)]))


def printed(report: object) -> str:
    text = io.StringIO()
    report.show(Console(file=text, width=120))  # type: ignore[attr-defined]
    return text.getvalue()


def test_report_says_how_fresh_replicas_are_and_what_they_cost(folder: Path) -> None:
    report = build_report(folder, REPLICAS, OPTIONS)
    assert report.auc == {"trainer": 1.0, "synced": 1.0, "frozen": 0.0}
    assert report.freshness_seconds == [0.1, 0.3, 0.1, 0.3], "without the first release"
    assert (report.unequal, report.rows_compared, report.events_evaluated) == ({}, 8, 4)
    text = printed(report)
    assert "freshness     p50 0.200 s   p99 0.300 s   max 0.300 s\n" in text
    assert "versions      2 of 4 steps, 20 rows\n" in text
    assert "bytes         0.0 MB published; full pushes: 0.0 MB, 0.3 times as much\n" in text
    assert text.endswith("rows equal:   yes\n")


@pytest.mark.parametrize("bit", [0, 31])
def test_one_flipped_bit_of_one_replica_is_reported(folder: Path, bit: int) -> None:
    damaged = WEIGHT.copy()
    damaged.view(np.uint32)[3, 1] ^= 1 << bit
    write_replica(folder, "b", {"t": damaged})
    report = build_report(folder, REPLICAS, OPTIONS)
    assert report.unequal == {"b": {"t": 1}}
    assert printed(report).endswith("rows equal:   NO: {'b': {'t': 1}}\n")


def test_replica_that_scored_other_events_is_an_error(folder: Path) -> None:
    scores: Tables = {"index": np.arange(7), "logit": LABEL[:7], "frozen": LABEL[:7], "label": LABEL[:7]}
    write_arrays(folder, "scores-a", scores)
    with pytest.raises(DemoFailed, match="trainer and a did not score the same events"):
        build_report(folder, REPLICAS, OPTIONS)


def test_report_of_a_rollback_names_the_versions_and_the_refusal() -> None:
    report = PoisonReport(
        unequal={}, auc={"canary": (0.7, 0.2, 0.65)}, version=40, newest=61, refused="the model was rolled back"
    )
    text = printed(report)
    assert "0.7000" in text
    assert "rollback      to version 40, whose rows are the newest version 61\n" in text
    assert "trainer       refused: the model was rolled back\n" in text
    assert text.endswith("rows equal:   yes\n")
    assert "rows equal:   NO" in printed(replace(report, unequal={"canary": {"t": 1}}))
