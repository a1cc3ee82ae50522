"""A policy on disk."""

from pathlib import Path

import pytest
from tests.support.local_service import opened
from tests.unit.support.async_tests import in_loop

from deltasync.core.policy import Policy


@pytest.mark.parametrize("limit", [None, 30.0])
@in_loop()
async def test_a_limit_of_readiness_outlives_a_restart(tmp_path: Path, limit: float | None) -> None:
    policy = Policy(top_k=3, ready_within_seconds=limit)
    async with opened(tmp_path) as service:
        await service.create_consumer("top", "clicks", policy)
    async with opened(tmp_path) as service:
        assert service.registry.get("top").policy == policy
