"""A policy on disk."""

import json
from pathlib import Path

import pytest
from tests.support.local_service import run
from tests.support.log import log_of

from deltasync.core.policy import Policy
from deltasync.service.service import Service


@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_limit_of_readiness_outlives_a_restart_and_where_there_is_none_services_of_before_can_read_the_policy(
    tmp_path: Path, limit: float | None
) -> None:
    policy = Policy(top_k=3, ready_within_seconds=limit)

    async def create(service: Service) -> None:
        await service.create_consumer("top", "clicks", policy)
        record = json.loads(log_of(service).items("consumer/")["top"])
        assert ("ready_within_seconds" in record["policy"]) == (limit is not None)

    async def look(service: Service) -> None:
        assert service.registry.get("top").policy == policy

    run(tmp_path, create)
    run(tmp_path, look)
