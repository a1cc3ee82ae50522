"""A process whose log is among brokers."""

from pathlib import Path

import pytest
from tests.support.local_service import opened

from deltasync.api.process import open_logs
from deltasync.base.errors import InvalidInput
from deltasync.service.options import ServiceOptions


async def test_a_cluster_process_refuses_the_data_directory_of_a_single_service(tmp_path: Path) -> None:
    """It would remove the checkpoints there."""
    async with opened(tmp_path):
        pass
    options = ServiceOptions(data_dir=tmp_path, log=("nats://127.0.0.1:1",), checkpoints="copies")
    assert options.brokers
    with pytest.raises(InvalidInput, match=r"log/data\.mdb; .* give another --data-dir"):
        await open_logs(options, options.brokers)
