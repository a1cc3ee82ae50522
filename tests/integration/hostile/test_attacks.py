"""All attacks, for a moment each: the honest go on, and the service takes no more than before."""

import pytest
from tests.attacks.families import ATTACKS
from tests.attacks.target import Target
from tests.support.besieged import Besieged

# What a stranger may do where there are no roles.
_ALLOWED = {"takeover", "joined-run"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - _ALLOWED))
def test_an_attack_leaves_nothing_behind(service: Besieged, name: str) -> None:
    """The second time: what is freed after the first one is kept for what comes next."""
    target = Target(service.grpc, service.http, seconds=0.2)
    ATTACKS[name].run(target)
    with service.unharmed():
        outcome = ATTACKS[name].run(target)
    assert not outcome.harm, outcome.said
