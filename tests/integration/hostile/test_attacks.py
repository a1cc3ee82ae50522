"""All attacks, for a moment each: the honest go on, and the service takes no more than before."""

import pytest
from tests.attacks.families import ATTACKS
from tests.attacks.target import Target
from tests.support.besieged import Besieged

# What a stranger may do where there are no roles.
_ALLOWED = {"takeover", "joined-run"}


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - _ALLOWED))
def test_an_attack_leaves_nothing_behind(service: Besieged, name: str) -> None:
    outcome = ATTACKS[name].run(Target(service.grpc, service.http, seconds=0.5))
    assert not outcome.harm, outcome.said
