"""What processes write of themselves, how far they have come, and in which words."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.documents import ROOT

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.events import Event, EventKind, EventLog
from deltasync.base.logs import Progress, levels, log_to_stderr, parse_levels, set_levels, under_way
from deltasync.base.words import are, counted, utc

SERVICE = ROOT / "sync_service"


@contextmanager
def logged(form: str = "", levels: str = "") -> Iterator[logging.Handler]:
    """What is logged there goes to standard error alone; handlers and levels are as before after that."""
    names = ("deltasync", "deltasync.events", "deltasync.api")
    before = {name: logging.getLogger(name).level for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])
        log_to_stderr(form, levels)
        yield logging.getLogger().handlers[0]
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_has_a_key_for_each_thing_that_it_concerns(capsys: pytest.CaptureFixture[str]) -> None:
    with logged("json"):
        refused = Event(
            EventKind.REPLICA_REFUSED, {"consumer": "c", "rank": 3}, "not let in", StorageFailed("full")
        )
        EventLog()(refused)
    (line,) = written(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", str(line.pop("time")))
    assert line == {
        "level": "warning",
        "logger": "deltasync.events",
        "event": "replica_refused",
        "consumer": "c",
        "rank": 3,
        "text": "not let in: full",
    }


def test_other_messages_and_errors_have_the_same_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with logged("json"):
        logging.getLogger("deltasync.api").info("listening: %s", "here")
        EventLog()(Event(EventKind.FAILED, {"model": "m"}, "tried again", KeyError("x")))
    message, failed = written(capsys)
    assert (message["event"], message["text"]) == ("message", "listening: here")
    assert "KeyError" in str(failed["traceback"])


@given(st.text(max_size=200))
@example("\U0001d400" * 200)
def test_a_line_stays_one_line_whatever_peers_say(text: str) -> None:
    record = logging.LogRecord("deltasync", logging.INFO, "", 0, "%s", (text * 100,), None)
    with logged("json") as handler:
        line = handler.format(record)
    assert "\n" not in line
    assert len(line) < 25_000  # 2,000 characters, of which JSON has up to 12 for one.
    json.loads(line)


def test_text_is_for_terminals_and_json_for_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTASYNC_LOG_FORMAT")
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with logged():
            logging.getLogger("deltasync").info("here")
        assert (capsys.readouterr().err[0] != "{") == terminal


def test_levels_are_named_and_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    with logged("json", "warning,deltasync.api=debug"):
        logging.getLogger("deltasync.events").info("not this")
        logging.getLogger("deltasync.api").debug("this")
        assert [line["text"] for line in written(capsys)] == ["this"]
        set_levels("deltasync.events=info")
        logging.getLogger("deltasync.events").info("now this")
        assert [line["text"] for line in written(capsys)] == ["now this"]
        assert levels().items() >= {"deltasync": "warning", "deltasync.api": "debug"}.items()


@pytest.mark.parametrize("wrong", ["loud", "INFO ", "root=info", "deltasync.api=", "info,,debug"])
def test_what_is_no_level_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="expected one of debug, info, warning, error"):
        parse_levels(wrong)


def test_the_page_of_operators_lists_all_keys() -> None:
    section = (SERVICE / "docs/operating.md").read_text().partition("\n## Logs\n")[2].partition("\n## ")[0]
    listed = {name for line in re.findall(r"(?m)^\| (`.*?) \|", section) for name in re.findall(r"`(\w+)`", line)}
    subjects = {
        keyword.arg
        for path in (SERVICE / "deltasync").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "emit"
        for keyword in call.keywords
        if keyword.arg not in (None, "error")
    }
    fixed = {"time", "level", "logger", "event", "text", "repeats", "traceback"}
    assert listed == fixed | subjects | {"by", "role", "address", "call", "name"}


# Progress of long work.

WORK = (("comparing table 'user'", "rows"), ("compiling", "kernels"))


def test_progress_is_logged_every_few_seconds_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    progress, compiling = (Progress(what, 9, unit, lambda: now[0]) for what, unit in WORK)
    for rows, seconds in ((1, 4.9), (2, 5.0), (3, 9.9), (4, 10.0), (9, 10.1)):
        now[0] = seconds
        progress.at(rows)
    compiling.add(4)
    Progress("quick work", 9).at(9)
    said = [f"comparing table 'user': {rows} of 9 rows" for rows in (2, 4, 9)]
    assert caplog.messages == [*said, "compiling: 4 of 9 kernels"]


def test_long_work_is_under_way_until_it_ends_or_is_dropped() -> None:
    now = [0.0]
    progress, other = Progress("b", 9, now=lambda: now[0]), Progress("a", 3, "bytes", lambda: now[0])

    def own() -> list[str]:  # A thread of another test may wait for silent storage.
        return [each for each in under_way() if each.startswith(("a: ", "b: "))]

    progress.at(8)
    now[0] = 0.9
    assert own() == []
    now[0] = 1.0
    assert own() == ["a: 0 of 3 bytes", "b: 8 of 9 rows"]
    progress.add(1)
    assert own() == ["a: 0 of 3 bytes"]
    del other
    assert own() == []


# Numbers and times as people read them.


@pytest.mark.parametrize(("number", "said"), [(0, "0 rows are"), (1, "1 row is"), (2, "2 rows are")])
def test_one_is_no_plural(number: int, said: str) -> None:
    assert are(number, "row") == said
    assert said.startswith(counted(number, "row"))


def test_a_time_is_that_of_utc_to_the_second() -> None:
    assert utc(10**18 + 999_999_999) == "2001-09-09T01:46:40Z"
