from pathlib import Path

from tests.soak.logs import tracebacks

LOG = """2026 INFO deltasync.events all is well
2026 ERROR deltasync.events it failed
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^

  File "b.py", line 2, in g
deltasync.core.errors.Damaged: a bit

2026 INFO deltasync.events on
"""


def test_the_last_line_of_each_traceback_is_found(tmp_path: Path) -> None:
    (tmp_path / "service.log").write_text(LOG)
    (tmp_path / "clicks-rank-0.log").write_text(LOG)
    (tmp_path / "whole.log").write_text("all is well\n")
    assert tracebacks(tmp_path) == ["service.log: deltasync.core.errors.Damaged: a bit"]
