"""Deletes over the wire: who follows is told, who was away too, and who knows of no deletes is sent zeros."""

from typing import Any

import numpy as np
import pytest
from tests.support.fleet import USER, WAIT, Recorder, Trainer, follow, wait_for_lag, wait_until_in_sync
from tests.support.server import RunningService

from deltasync.client import Part, Publisher, PublisherOptions
from deltasync.core.policy import Policy
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard
from deltasync.core.value_types import ValueType

POLICIES = {"top": Policy(top_k=1, max_bytes=100, value_type=ValueType.INT8)}
GONE = np.array([3, 5, 40])


def wait_for(service: RunningService, consumer: str, replica: str, head: int) -> None:
    def has_all(lag: dict[str, Any]) -> bool:
        its = next(each for each in lag["replicas"] if each["replica"] == replica)
        return bool(lag["head"] == head and its["lag"]["rows"] == its["lag"]["versions"] == 0)

    wait_for_lag(service, consumer, has_all)


def deleted_in(target: Recorder) -> list[int]:
    return [row for release in target.releases for rows in release.rows if rows.deleted for row in rows.ids]


@pytest.mark.parametrize("consumer", ["predictors", "top"])
def test_everybody_learns_of_deletes(service: RunningService, consumer: str) -> None:
    """One delete a release would be all that the policy lets out."""
    there, away, late = Recorder(), Recorder(), Recorder()
    value_type = ValueType.INT8 if consumer == "top" else ValueType.FP32
    with Trainer(service.grpc, [USER]) as trainer, follow(service, consumer, "there", there):
        with follow(service, consumer, "away", away) as left:
            wait_until_in_sync(service, consumer, trainer.publish_all(), replicas=2)
        head = trainer.delete(USER, GONE).number
        wait_for(service, consumer, "there", head)
        assert deleted_in(there) == GONE.tolist()
        # In the release after: top_k alone would have let one of them out.
        assert len({release.position for release in there.releases[1:] if release.rows}) == 1
        newest = trainer.set(USER, 5, 2.5)  # It comes back: a new row.
        wait_for(service, consumer, "there", newest.number)
        with follow(service, consumer, "away", away, held=left.held), follow(service, consumer, "late", late):
            lag = wait_until_in_sync(service, consumer, newest, replicas=3)
        assert deleted_in(away) == [3, 40]
        assert deleted_in(late) == []
        for target in (there, away, late):
            assert target.bytes() == trainer.expected(value_type)
        assert all(replica["checked"] for replica in lag["replicas"])
        assert lag["damages"] == 0


def test_a_delete_of_no_row_of_the_shard_is_refused_and_nothing_is_written(service: RunningService) -> None:
    with Trainer(service.grpc, [USER]) as trainer:
        trainer.publish_all()
        options = PublisherOptions(service=service.grpc, model="clicks", run="other", run_started_unix_ns=2)
        with Publisher(options, [USER], [Shard.whole(USER)]) as other:
            rows = [RowBatch.deletes(Shard.whole(USER), np.array([60]))]
            refused = other.publish(Part(step=1, step_end_unix_ns=1, rows=rows, full=True))
            with pytest.raises(ValueError, match="row id 60 is outside this rank's rows 0 to 59"):
                refused.result(WAIT)
    assert service.get_json("/consumers/predictors")["head"] == 1
