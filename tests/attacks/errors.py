"""What a peer sends, told back to it and written to the log."""

from typing import Any

from tests.attacks.attack import Family, Outcome
from tests.attacks.messages import PUBLISH, SUBSCRIBE, asked, at_once, opening, subscription
from tests.attacks.target import Target

from deltasync.v1 import tables_pb2

FAMILY = Family()


@FAMILY.attack("a misspelt consumer among 600", consumers=600)
def misspelt_consumer(target: Target) -> Outcome:
    answers = asked(target, SUBSCRIBE, subscription("stranger", "misspelt"))
    refused = answers.counts["NOT_FOUND"] or answers.counts["PERMISSION_DENIED"]
    return Outcome(answers.outcome.said, answers.outcome.harm if refused else "a refusal of another kind")


@FAMILY.attack("3 MB of forged log lines in a subscription")
def forged_lines(target: Target) -> Outcome:
    forged = "\n2026-01-01 00:00:00 INFO deltasync.base.events admin deleted the model" * 43_000
    held = tables_pb2.Position(history=forged, version=1)
    return at_once(target, SUBSCRIBE, 20, lambda number: subscription(f"stranger-{number}", held=held), 5)


@FAMILY.attack("100 opens with forged log lines of 1 MB as names")
def long_names(target: Target) -> Outcome:
    forged = "\nERROR all is lost" * 60_000

    def open_of(number: int) -> Any:
        fields: dict[str, Any] = {"model": f"strange-{number}"}
        return opening(**fields | {("model", "run", "table", "process")[number % 4]: forged})

    return at_once(target, PUBLISH, 100, open_of)
