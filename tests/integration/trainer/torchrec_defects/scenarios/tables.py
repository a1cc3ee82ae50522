"""Rows 13, 16 and 23: which tables."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import changed, ids_of
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    SEQUENCES,
    bags,
    distributed,
    lookups,
    sequences,
    sharded,
    train,
)
from tests.integration.trainer.torchrec_defects.scenarios import scenario
from tests.integration.trainer.tracking.rows import weights
from torchrec.distributed.sharding_plan import data_parallel

from deltasync.trainer.tracking import Tracker, TrackerOptions

T0, T1, T2, S = f"{BAGS}.t0", f"{BAGS}.t1", f"{BAGS}.t2", f"{SEQUENCES}.s"


@scenario(row=13)
def skipped_tables_train_on_untracked() -> None:
    everything = {T0: [1], T1: [2], S: [3]}
    for skips, kept in [
        (["t1"], [T0, S]),  # a table's name
        ([T1], [T0, S]),  # its FQN
        (["embedding_bags"], [S]),  # a part of a path
        (["bags"], [S]),  # a parent
        (["bags.embedding_bags"], [S]),
        (["embedding_bags.t0", "sequences"], [T1]),
        (["bags", "sequences"], []),
    ]:
        model = sharded({"bags": bags("t0", "t1"), "sequences": sequences("s")})
        tracker = Tracker(model, TrackerOptions(fqns_to_skip=skips))
        before = weights(model)
        train(model, t0=[1], t1=[2], s=[3])
        tracker.step()
        assert changed(model, before) == everything
        assert ids_of(tracker.get_delta()) == {fqn: everything[fqn] for fqn in kept}


@scenario(row=16, ranks=2)
def data_parallel_tables_can_be_left_out() -> None:
    model = sharded({"bags": bags("t0")}, {"t0": data_parallel()})
    assert [table.name for table in Tracker(model).tables] == [T0]
    assert Tracker(model, TrackerOptions(replicas=False)).tables == []


@scenario(row=23)
def a_model_that_is_one_collection_is_tracked() -> None:
    model = distributed(bags("t0"), {}, EmbOptimType.EXACT_SGD)
    tracker = Tracker(model)
    model(lookups(t0=[6])).values().sum().backward()
    tracker.step()
    assert ids_of(tracker.get_delta()) == {"embedding_bags.t0": [6]}
