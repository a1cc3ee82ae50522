"""Of volumes it is said what they have left, and of brokers, who do not say it, nothing."""

from pathlib import Path

from deltasync.status.metrics import _volume_metrics
from deltasync.storage.broker_volume import BrokerVolume
from deltasync.storage.volume import Volume


def test_brokers_are_not_full_because_they_do_not_say_what_is_left(tmp_path: Path) -> None:
    brokers = BrokerVolume("b0:4222")
    free, failed = _volume_metrics([brokers, Volume("models", tmp_path)])
    assert [(each.labels["volume"], each.value > 0) for each in free.samples] == [("models", True)]
    assert [(each.labels["volume"], each.value) for each in failed.samples] == [("log", 0), ("models", 0)]
    brokers.troubles["clicks"] = "they do not answer"
    _, failed = _volume_metrics([brokers])
    assert [each.value for each in failed.samples] == [1]
