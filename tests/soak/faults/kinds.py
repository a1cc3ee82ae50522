"""The table of all kinds of faults.

Each runs in a thread of its own, returns once what it has done is undone, and says whose replicas are to recover
from it: those of these models. A kind that is added to `KINDS` is in every schedule from then on.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from tests.soak.faults import backups, disk, guests, network, operators, processes, trainers
from tests.soak.faults.moments import KILLS
from tests.soak.fleet import Fleet
from tests.soak.schedule import Fault
from tests.soak.world import World

Kind: TypeAlias = Callable[[World, Fault], Sequence[str]]

KINDS: dict[str, Kind] = {
    "kill service": processes.kill_service,
    "kill rank": processes.kill_rank,
    "kill all ranks": processes.kill_ranks,
    "kill TorchRec rank": processes.kill_torchrec_rank,
    "kill replica": processes.kill_replica,
    "kill all replicas": processes.kill_replicas,
    "kill everything": processes.kill_everything,
    "freeze service": processes.freeze_service,
    "freeze rank": processes.freeze_rank,
    "freeze all ranks": processes.freeze_ranks,
    "freeze replica": processes.freeze_replica,
    "restart service": processes.restart_service,
    "service away": processes.service_away,
    "rank leaves": processes.rank_leaves,
    "replica leaves": processes.replica_leaves,
    "backup restored": backups.put_back,
    "backup damaged": backups.damage_backup,
    "kill restore": backups.put_back_after_kill,
    "directory put back by hand": backups.put_back_by_hand,
    "disk full": disk.fill_disk,
    "disk slow": disk.slow_disk,
    "bit flipped at rest": disk.flip,
    "connection cut": network.cut,
    "connection half-open": network.half_open,
    "connection delayed": network.delay,
    "slow reader": network.slow_reader,
    "trainer behind": trainers.rewind,
    "takeover": trainers.take_over,
    "other world size": trainers.resize,
    "table added": trainers.add_table,
    "table grown": trainers.grow_table,
    "NaN published": partial(trainers.poison, math.nan),
    "norms explode": partial(trainers.poison, 1e30),
    "quarantine": guests.quarantine,
    "model deleted": guests.delete_model,
    "table deleted": guests.delete_table,
    "two replicas of one name": guests.two_of_one_name,
    "replica forgotten": guests.forget_replica,
    "policy changed": operators.change_policy,
    "configuration reloaded": operators.reload,
    "consumer made and deleted": operators.passing_consumer,
    "consumer paused": operators.pause,
    "rows deleted": operators.delete_rows,
    "fsck": operators.look_at_all_rows,
    "clock set": operators.set_clock,
    **{kind: partial(kill, step) for kind, (kill, step) in KILLS.items()},
}

# They wait for their moment, and begin when they end.
SUDDEN = set(KILLS)


def kinds_of(fleet: Fleet) -> list[str]:
    """The kinds that can happen to a fleet."""
    return sorted(kind for kind in KINDS if fleet.clicks or kind != "kill TorchRec rank")
