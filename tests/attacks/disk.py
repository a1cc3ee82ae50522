"""Space and names that are taken by opening streams alone."""

from tests.attacks.attack import Answers, Family, Outcome
from tests.attacks.messages import PUBLISH, ask, asked, at_once, opening
from tests.attacks.target import Target

FAMILY = Family()
_VOLUME = 1 << 30


@FAMILY.attack("a table of 512 MiB on a volume of 1 GiB", volume_bytes=_VOLUME)
def large_open(target: Target) -> Outcome:
    return asked(target, PUBLISH, opening("strange-large", 1 << 21, 64)).outcome


@FAMILY.attack("20 tables of 4 TiB on a volume of 1 GiB", volume_bytes=_VOLUME)
def huge_opens(target: Target) -> Outcome:
    answers = Answers()
    with target.channel() as channel:
        for number in range(20):
            ask(target, channel, answers, PUBLISH, opening(f"strange-huge-{number}", 1 << 34, 64))
    return answers.outcome


@FAMILY.attack("300 refused opens", volume_bytes=_VOLUME)
def refused_opens(target: Target) -> Outcome:
    return at_once(target, PUBLISH, 300, lambda number: opening(f"strange-refused-{number}", 1 << 40, 64))


@FAMILY.attack("300 models that never publish a row", volume_bytes=_VOLUME)
def empty_models(target: Target) -> Outcome:
    return at_once(target, PUBLISH, 300, lambda number: opening(f"strange-empty-{number}", 50_000, 16))
