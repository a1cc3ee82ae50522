"""All attacks, for a moment each: the honest go on, and the service takes no more than before."""

import pytest
from tests.attacks.families import ATTACKS
from tests.attacks.target import Target
from tests.support.besieged import Besieged

# What a stranger may do where there are no roles.
_ALLOWED = {"takeover", "joined-run"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - _ALLOWED))
def test_an_attack_leaves_nothing_behind(service: Besieged, name: str) -> None:
    """The second time: what is freed after the first one is kept for what comes next. The first lasts longer, or
    it may get less done, by chance.
    """
    first, second = (Target(service.grpc, service.http, seconds=each) for each in (0.8, 0.2))
    ATTACKS[name].run(first)
    with service.unharmed():
        outcome = ATTACKS[name].run(second)
    assert not outcome.harm, outcome.said
