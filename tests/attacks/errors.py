"""What a peer sends, told back to it and written to the log."""

from concurrent.futures import ThreadPoolExecutor

from tests.attacks.attack import Answers, Family, Outcome
from tests.attacks.messages import PUBLISH, SUBSCRIBE, Stream, opening, subscription
from tests.attacks.target import Target

from deltasync.v1 import tables_pb2

FAMILY = Family()


@FAMILY.attack("a misspelt consumer, where there are 600", consumers=600)
def misspelt_consumer(target: Target) -> Outcome:
    answers = Answers()
    with target.channel() as channel:
        stream = Stream(target, channel, SUBSCRIBE)
        stream.send(subscription("stranger", "misspelt"))
        stream.end()
        answers.take(stream.answers)
    wrong = (
        "" if answers.counts["NOT_FOUND"] or answers.counts["PERMISSION_DENIED"] else "a refusal of another kind"
    )
    return Outcome(answers.outcome.said, wrong or answers.outcome.harm)


@FAMILY.attack("20 subscriptions whose history is 3 MB of forged lines of log")
def forged_lines(target: Target) -> Outcome:
    forged, answers = (
        "\n2026-01-01 00:00:00 INFO deltasync.core.events admin deleted the model" * 43_000,
        Answers(),
    )
    with target.channels(5) as channels, ThreadPoolExecutor(5) as pool:

        def attack(number: int) -> None:
            held = tables_pb2.Position(history=forged, version=1)
            stream = Stream(target, channels[number % 5], SUBSCRIBE)
            stream.send(subscription(f"stranger-{number}", held=held))
            stream.end()
            answers.take(stream.answers)

        list(pool.map(attack, range(20)))
    return answers.outcome


@FAMILY.attack("100 opens whose names are each 1 MB of forged lines of log")
def long_names(target: Target) -> Outcome:
    forged, answers = "\nERROR all is lost" * 60_000, Answers()
    with target.channels(4) as channels, ThreadPoolExecutor(4) as pool:

        def attack(number: int) -> None:
            fields = [{"model": forged}, {"run": forged}, {"table": forged}, {"process": forged}][number % 4]
            stream = Stream(target, channels[number % 4], PUBLISH)
            stream.send(opening(**{"model": f"strange-{number}"} | fields))  # type: ignore[arg-type]
            stream.end()
            answers.take(stream.answers)

        list(pool.map(attack, range(100)))
    return answers.outcome
