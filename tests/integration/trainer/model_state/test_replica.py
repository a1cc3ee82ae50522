"""What a replica computes is what the trainer's model would compute in one piece, with the state of that step."""

from pathlib import Path

import pytest
from tests.integration.trainer.model_state.models import CASES
from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks

# By day one plan of bags; at night every case.
GROUPS = ("bags-row-wise", "bags", "sequences", "raw-ids-of-bags", "raw-ids-of-sequences", "hashed-ids-of-bags")


@pytest.mark.parametrize(
    "group", [GROUPS[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in GROUPS[1:])]
)
def test_a_replica_computes_what_the_whole_model_would(service: ServiceProcess, group: str) -> None:
    cases = [name for name in CASES if name.startswith(group)]
    run_ranks(str(Path(__file__).with_name("replica_ranks.py")), service.grpc, service.http, *cases)
    for name in cases:
        lines = [line for line in service.get_json("/tables") if line["model"] == name]
        differing = {line["table"].rpartition(".")[2] for line in lines if line["ranks_differ"]}
        # Of each rank's own batches; what else there is of buffers is alike.
        assert {"running_mean", "running_var"} <= differing
        assert all(line["kind"] == "buffer" for line in lines if line["ranks_differ"])
        assert any(line["kind"] == "buffer" and not line["ranks_differ"] for line in lines)


def test_every_case_is_in_a_group() -> None:
    assert all(name.startswith(GROUPS) for name in CASES)
