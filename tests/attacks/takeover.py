"""Publishing what one has no right to: taking a run over, replacing rows, and joining a run by its id."""

import re
import time

import grpc
from tests.attacks.attack import Answers, Family
from tests.attacks.honest import TABLE
from tests.attacks.messages import PUBLISH, Stream, full_part, opening
from tests.attacks.target import MODEL, Target

from deltasync.v1 import publish_pb2, tables_pb2

FAMILY = Family()


@FAMILY.attack("a later run of the same model takes over, and replaces all rows")
def takeover(target: Target) -> str:
    shape = {"rows": TABLE.rows, "dim": TABLE.dim, "table": TABLE.name}
    with target.channel() as channel:
        stream, answers = Stream(target, channel, PUBLISH), Answers()
        try:
            stream.send(opening(MODEL, **shape))  # type: ignore[arg-type]
            next(stream.answers)
            half = TABLE.rows // 2
            for step, first in ((1, 0), (1, half)):
                stream.send(_chunk(step, first, half))
            stream.send(_close(1, TABLE.rows))
            stream.end()
            answers.take(stream.answers)
        except grpc.RpcError as error:
            answers.refused(error)
    return str(answers)


def _chunk(step: int, first: int, rows: int) -> publish_pb2.PublishRequest:
    whole = full_part(step, rows, TABLE.dim, 6.66).part.rows[0]
    ids = b"".join((first + row).to_bytes(8, "little") for row in range(rows))
    sent = tables_pb2.Rows(ids=ids, values=whole.values)
    return publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=step, rows=sent))


def _close(step: int, rows: int) -> publish_pb2.PublishRequest:
    close = publish_pb2.PartClose(step=step, rows=rows, step_end_unix_ns=time.time_ns(), full=True)
    return publish_pb2.PublishRequest(close=close)


@FAMILY.attack("the run's id is asked for by a refusal, and then joined with one poisoned row")
def joined_run(target: Target) -> str:
    with target.channel() as channel:
        told, answers = Answers(), Answers()
        asking = Stream(target, channel, PUBLISH)
        shape = {"rows": TABLE.rows, "dim": TABLE.dim, "table": TABLE.name}
        asking.send(opening(MODEL, run_started_unix_ns=1, **shape))  # type: ignore[arg-type]
        asking.end()
        told.take(asking.answers)
        found = re.search(r"before run ([^,; ]+)", told.longest)
        if not found:
            return f"the refusal tells no run: {told}"
        stream = Stream(target, channel, PUBLISH)
        try:
            stream.send(opening(MODEL, run=found[1], **shape))  # type: ignore[arg-type]
            step = 10**6
            opened = publish_pb2.PublishResponse.FromString(next(stream.answers)).opened
            stream.send(
                _chunk(step, 7, 1), publish_pb2.PublishRequest(close=publish_pb2.PartClose(step=step, rows=1))
            )
            stream.end()
            answers.take(stream.answers)
        except grpc.RpcError as error:
            answers.refused(error)
            return f"run {found[1]!r} was told; {answers}"
    return f"run {found[1]!r} was told, continues: {opened.continues}; {answers}"


@FAMILY.attack("the model's table is announced in another shape, before its trainer does")
def other_shape(target: Target) -> str:
    """What the honest ones would do next: a model of their own, whose name was taken."""
    with target.channel() as channel:
        answers = Answers()
        for rows in (5, TABLE.rows):
            stream = Stream(target, channel, PUBLISH)
            stream.send(opening("strange-next", rows, 4 if rows == 5 else 16, run=f"run-{rows}"))
            stream.end()
            answers.take(stream.answers)
    return str(answers)
