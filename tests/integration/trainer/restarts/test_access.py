"""A trainer whose rights, or token, are gone for a while: training goes on, and publishing once it may."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.trainer.following import WAIT, Trainer
from tests.support.guarded import ROLES, GuardedService, token_of

from deltasync.client import Endpoint


@pytest.fixture
def service(tmp_path: Path) -> Iterator[GuardedService]:
    with GuardedService(tmp_path) as service:
        yield service


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(token_of("trainer"))
    return path


def test_a_trainer_without_its_rights_trains_on_and_publishes_later(
    service: GuardedService, token_file: Path
) -> None:
    trainer = Trainer(Endpoint(service.grpc, token_file=token_file))
    trainer.sync.flush(WAIT)
    service.write_roles({**ROLES, "trainer": ["read"]})
    trainer.step_until("role publish")
    token_file.unlink()
    trainer.step_until("token_file")
    service.write_roles()
    token_file.write_text(token_of("trainer"))
    trainer.step_until("")
    assert trainer.sync.close(WAIT).number > 1
