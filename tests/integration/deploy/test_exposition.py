"""What promtool thinks of the metrics of a service at work."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.support.fleet import Trainer, follow, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.client import NumpyTarget
from deltasync.core.policy import Policy


def test_promtool_accepts_the_metrics(tool: Callable[[str], str], tmp_path: Path) -> None:
    with (
        RunningService(tmp_path / "data", policies={"mobile": Policy(top_k=5)}) as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", NumpyTarget()),
        follow(service, "mobile", "m", NumpyTarget()),
    ):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        _, exposition = service.get("/metrics")
    done = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=exposition, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
