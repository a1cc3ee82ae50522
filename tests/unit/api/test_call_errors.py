"""What peers are told of errors, and what a log says of what they have sent: bounded, and on one line."""

import json
import logging
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.access.roles import CALL, Call, Grant, Identity, Role
from deltasync.api.errors import error_response, message_of
from deltasync.base.errors import InvalidInput, NotFound, StorageFailed
from deltasync.base.logs import log_to_stderr

READER = Call(identity=Identity("reader", (Grant(Role.READ),)))
FORGED = "x\n2026-01-01 00:00:00,000 INFO deltasync forged\r\x1b[2J"


# Long texts, of which Hypothesis draws only the beginning: drawing each character takes seconds.
TEXTS = st.builds(str.__mul__, st.text(max_size=80), st.sampled_from([1, 50]))


@given(TEXTS, TEXTS)
def test_an_error_is_one_line_below_2_kb_however_it_is_written(text: str, detail: str) -> None:
    for call in (Call(), READER):
        before = CALL.set(call)
        try:
            said, body = (
                message_of(NotFound(text, detail=detail)),
                error_response(NotFound(text, detail=detail)).body,
            )
        finally:
            CALL.reset(before)
        assert said.isprintable()
        assert len(quote(said, safe=" !\"#$&'()*+,/:;<=>?@[\\]^_`{|}~")) < 2_000
        assert len(bytes(body)) < 2_048
        assert json.loads(bytes(body))["message"] == said


def test_details_and_folders_are_told_to_those_who_may_read() -> None:
    errors = [NotFound("no model 'x'", detail="; models: a, b"), StorageFailed("/data/log: 5 bytes free")]
    assert [message_of(each) for each in errors] == [
        "no model 'x'",
        "the service cannot store this; see its log",
    ]
    before = CALL.set(READER)
    try:
        assert [message_of(each) for each in errors] == ["no model 'x'; models: a, b", "/data/log: 5 bytes free"]
    finally:
        CALL.reset(before)


def test_what_somebody_has_said_cannot_look_like_a_line_of_the_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    log_to_stderr()
    try:
        raise InvalidInput(FORGED)
    except InvalidInput as error:
        root.warning("said: %s", error)
        root.exception("failed")
    root.warning("%s", "y" * 10**6)
    lines = capsys.readouterr().err.splitlines()
    ours = [line for line in lines if not line.startswith("    ")]
    assert [line.split(" ", 4)[4].split(":")[0] for line in ours[:2]] == ["said", "failed"]
    assert len(ours) == 3
    assert all(line.isprintable() and len(line) < 2_100 for line in lines)
