"""Rows 11 to 13, 16 and 23: which tables."""

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.torchrec_defects.copies import changed, followed, ids_of
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    SEQUENCES,
    bag,
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

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking import Tracker, TrackerOptions

T0, T1, T2, S = f"{BAGS}.t0", f"{BAGS}.t1", f"{BAGS}.t2", f"{SEQUENCES}.s"


@scenario(row=11)
def a_shared_feature_counts_for_each_of_its_tables() -> None:
    model = sharded({"bags": bags(bag("t0", "f0"), bag("t1", "f0", "f1"), bag("t2", "f1"))})
    tracker, copy = followed(model)
    before = weights(model)
    train(model, f0=[0, 1], f1=[2, 3])
    tracker.step()
    assert copy.update() == changed(model, before) == {T0: [0, 1], T1: [0, 1, 2, 3], T2: [2, 3]}
    copy.check(model)


@scenario(row=12)
def tables_of_one_name_in_two_modules_are_two() -> None:
    model = sharded({"left": bags(bag("t", "f0")), "right": bags(bag("t", "f1")), "both": sequences("t")})
    left, right, both = "left.embedding_bags.t", "right.embedding_bags.t", "both.embeddings.t"
    tracker, copy = followed(model)
    train(model, f0=[0, 1], f1=[2], t=[3])
    tracker.step()
    assert copy.update() == {left: [0, 1], right: [2], both: [3]}
    copy.check(model)


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


@scenario(row=13)
def a_skip_that_fits_nothing_is_refused() -> None:
    model = sharded({"bags": bags("t0", "t1")})
    for wrong in ("t2", "t", "bag", "bags.t0", ""):
        with pytest.raises(InvalidInput, match=rf"fqns_to_skip: '{wrong}' .*tables: {T0}, {T1}"):
            Tracker(model, TrackerOptions(fqns_to_skip=["t0", wrong]))


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
