"""Publishing what one has no right to: taking a run over, replacing rows, and joining a run by its id."""

import re
import time
from typing import Any

import grpc
from tests.attacks.attack import Answers, Family, Outcome
from tests.attacks.honest import TABLE
from tests.attacks.messages import PUBLISH, Stream, ask, full_part, opening
from tests.attacks.target import MODEL, Target

from deltasync.v1 import publish_pb2, tables_pb2

FAMILY = Family()
_SHAPE: dict[str, Any] = {"rows": TABLE.rows, "dim": TABLE.dim, "table": TABLE.name}


@FAMILY.attack("a later run of the model takes over and replaces all rows")
def takeover(target: Target) -> Outcome:
    with target.channel() as channel:
        stream, answers = Stream(target, channel, PUBLISH), Answers()
        try:
            stream.send(opening(MODEL, **_SHAPE))
            next(stream.answers)
            half = TABLE.rows // 2
            for step, first in ((1, 0), (1, half)):
                stream.send(_chunk(step, first, half))
            stream.send(_close(1, TABLE.rows))
            stream.end()
            answers.take(stream.answers)
        except grpc.RpcError as error:
            answers.refused(error)
    return answers.outcome


def _chunk(step: int, first: int, rows: int) -> publish_pb2.PublishRequest:
    whole = full_part(step, rows, TABLE.dim, 6.66).part.rows[0].rows
    ids = b"".join((first + row).to_bytes(8, "little") for row in range(rows))
    sent = tables_pb2.TableRows(rows=tables_pb2.Rows(ids=ids, values=whole.values))
    return publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=step, rows=sent))


def _close(step: int, rows: int) -> publish_pb2.PublishRequest:
    close = publish_pb2.PartClose(step=step, rows=rows, step_end_unix_ns=time.time_ns(), full=True)
    return publish_pb2.PublishRequest(close=close)


@FAMILY.attack("a peer learns a run's id from a refusal and joins it with a poisoned row")
def joined_run(target: Target) -> Outcome:
    with target.channel() as channel:
        told, answers = Answers(), Answers()
        ask(target, channel, told, PUBLISH, opening(MODEL, run_started_unix_ns=1, **_SHAPE))
        found = re.search(r"before run ([^,; ]+)", told.longest)
        if not found:
            return Outcome(f"the refusal tells no run: {told.outcome.said}")
        stream = Stream(target, channel, PUBLISH)
        try:
            stream.send(opening(MODEL, run=found[1], **_SHAPE))
            step = 10**6
            opened = publish_pb2.PublishResponse.FromString(next(stream.answers)).opened
            stream.send(
                _chunk(step, 7, 1), publish_pb2.PublishRequest(close=publish_pb2.PartClose(step=step, rows=1))
            )
            stream.end()
            answers.take(stream.answers)
        except grpc.RpcError as error:
            answers.refused(error)
            return Outcome(f"run {found[1]!r} was told; {answers.outcome.said}")
    return Outcome(f"run {found[1]!r} was told, continues: {opened.continues}; {answers.outcome.said}")


@FAMILY.attack("a table of another shape, opened before its trainer opens it")
def other_shape(target: Target) -> Outcome:
    """Of a model that is to come, whose name is taken then."""
    with target.channel() as channel:
        answers = Answers()
        for rows, dim in ((5, 4), (TABLE.rows, TABLE.dim)):
            ask(target, channel, answers, PUBLISH, opening("strange-next", rows, dim, run=f"run-{rows}"))
    taken = answers.counts["answers"] == 1 and "float32, the run has" in answers.longest
    return Outcome(answers.outcome.said, "the table keeps the shape that a stranger has given it" if taken else "")
