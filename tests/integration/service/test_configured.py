"""A configuration that does not fit what the service has: it starts, and says what is not as wanted."""

from pathlib import Path

import pytest
from tests.support.fleet import WAIT, Trainer, follow
from tests.support.process import ServiceProcess

from deltasync.client import NumpyTarget


def config(folder: Path, text: str) -> tuple[str, str]:
    path = folder / "settings.toml"
    path.write_text(text)
    return "--config", str(path)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ('[consumers.mobile]\nmodel = "other"\n', "consumer 'mobile' exists for model 'clicks': delete it first"),
        ('[consumers.mobile]\nmodel = "clicks"\ntables = ["gone"]\n', "tables gone: no table of the model fits"),
    ],
)
def test_a_consumer_that_cannot_be_as_configured_stays_as_it_is_and_says_so(
    tmp_path: Path, changed: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data, target = tmp_path / "data", NumpyTarget()
    before = config(tmp_path, '[consumers.mobile]\nmodel = "clicks"\n')
    with ServiceProcess(data, *before) as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        held = trainer.expected()
        assert service.terminate() == 0
    capfd.readouterr()
    after = config(tmp_path, changed + '[consumers.new]\nmodel = "clicks"\n')
    with ServiceProcess(data, *after) as service:
        for name in ("mobile", "new"):
            with follow(service, name, "p", target) as replica:
                replica.wait_for(1, WAIT)
            assert {name: rows.tobytes() for name, rows in target.tables.items()} == held
        status, ready = service.get("/readyz")
        assert (status, ready.splitlines()[0]) == (200, "ok")
        assert "consumer 'mobile': its configuration is refused" in ready
        assert said in ready
        assert said in service.get_json("/consumers/mobile/lag")["reason"]
        assert said not in service.get_json("/consumers/new/lag")["reason"]
        assert service.terminate() == 0
    assert "failed: consumer=mobile its configuration is refused" in capfd.readouterr().err
