"""A data directory of which a part is missing: the service ends with a sentence, and not by a signal."""

import shutil
from pathlib import Path

from tests.support.fleet import Trainer
from tests.support.process import ServiceProcess


def test_a_log_that_is_gone_from_beside_its_models_is_missed(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
    shutil.rmtree(tmp_path / "log")
    ended = ServiceProcess(tmp_path).run_to_end()
    assert ended.returncode == 1
    assert f"{tmp_path / 'models'} has tables, but the log beside it is missing" in ended.stderr
    assert "Traceback" not in ended.stderr
