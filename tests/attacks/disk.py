"""Space and names that are taken by opening streams alone."""

from concurrent.futures import ThreadPoolExecutor

import grpc
from tests.attacks.attack import Answers, Family, Outcome
from tests.attacks.messages import PUBLISH, Stream, opening
from tests.attacks.target import Target

FAMILY = Family()
_VOLUME = 1 << 30


def _opened(target: Target, channel: grpc.Channel, answers: Answers, model: str, rows: int, dim: int) -> None:
    stream = Stream(target, channel, PUBLISH)
    stream.send(opening(model, rows, dim))
    stream.end()
    answers.take(stream.answers)


@FAMILY.attack("one open of a table of 512 MiB, on a volume of 1 GiB", volume_bytes=_VOLUME)
def large_open(target: Target) -> Outcome:
    answers = Answers()
    with target.channel() as channel:
        _opened(target, channel, answers, "strange-large", 1 << 21, 64)
    return answers.outcome


@FAMILY.attack("opens of tables of 4 TiB, one after the other, on a volume of 1 GiB", volume_bytes=_VOLUME)
def huge_opens(target: Target) -> Outcome:
    answers = Answers()
    with target.channel() as channel:
        for number in range(20):
            _opened(target, channel, answers, f"strange-huge-{number}", 1 << 34, 64)
    return answers.outcome


@FAMILY.attack("300 opens of models that are refused", volume_bytes=_VOLUME)
def refused_opens(target: Target) -> Outcome:
    answers = Answers()
    with target.channels(4) as channels, ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda n: _opened(target, channels[n % 4], answers, f"strange-refused-{n}", 1 << 40, 64),
                range(300),
            )
        )
    return answers.outcome


@FAMILY.attack("300 models of one small table, of which no row is ever published", volume_bytes=_VOLUME)
def empty_models(target: Target) -> Outcome:
    answers = Answers()
    with target.channels(4) as channels, ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda n: _opened(target, channels[n % 4], answers, f"strange-empty-{n}", 50_000, 16), range(300)
            )
        )
    return answers.outcome
