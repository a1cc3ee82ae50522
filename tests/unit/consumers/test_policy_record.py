"""A policy on disk."""

from pathlib import Path

import pytest
from tests.support.local_service import run

from deltasync.core.policy import Policy
from deltasync.service.service import Service


@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_limit_of_readiness_outlives_a_restart(tmp_path: Path, limit: float | None) -> None:
    policy = Policy(top_k=3, ready_within_seconds=limit)

    async def create(service: Service) -> None:
        await service.create_consumer("top", "clicks", policy)

    async def look(service: Service) -> None:
        assert service.registry.get("top").policy == policy

    run(tmp_path, create)
    run(tmp_path, look)
