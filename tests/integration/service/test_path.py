"""From a part to a replica's row, with a real service process and real sockets."""

from tests.support.fleet import ITEM, USER, WAIT, Recorder, Trainer, follow
from tests.support.process import ServiceProcess


def test_rows_reach_a_replica_and_survive_kill_9(service: ServiceProcess) -> None:
    target, late = Recorder(), Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "p0", target) as replica:
        first = trainer.publish_all()
        assert first.number == 1
        replica.wait_for(1, WAIT)
        assert target.bytes() == trainer.expected()
        service.kill()
        service.start()
        second = trainer.change(2, [USER])
        assert (second.history, second.number) == (first.history, 2)
        replica.wait_for(2, WAIT)
        assert target.bytes() == trainer.expected()
        with follow(service, "predictors", "p1", late, max_outstanding_bytes=USER.row_bytes) as joining:
            joining.wait_for(2, WAIT)
        assert late.bytes() == trainer.expected()
        assert late.received_rows == USER.rows + ITEM.rows
