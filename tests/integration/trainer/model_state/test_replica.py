"""What a replica computes is what the trainer's model would compute in one piece, with the state of that step."""

from pathlib import Path

import pytest
from tests.integration.trainer.model_state.models import CASES
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

GROUPS = ("bags", "sequences", "raw-ids-of-bags", "raw-ids-of-sequences", "hashed-ids-of-bags")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_replica_computes_what_the_whole_model_would(service: ServiceProcess, group: str) -> None:
    cases = [name for name in CASES if name.startswith(group)]
    run_ranks(str(Path(__file__).with_name("replica_ranks.py")), service.grpc, *cases)


def test_every_case_is_in_a_group() -> None:
    assert all(name.startswith(GROUPS) for name in CASES)
