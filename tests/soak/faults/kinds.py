"""The table of all kinds of faults.

Each runs in a thread of its own, returns once what it has done is undone, and says whose replicas are to recover
from it: those of these models. A kind that is added to `KINDS` is in every schedule from then on.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from tests.soak.faults import backups, disk, guests, network, operators, processes, trainers, versions
from tests.soak.faults.moments import KILLS
from tests.soak.fleet import Fleet
from tests.soak.schedule import Fault
from tests.soak.world import World

Kind: TypeAlias = Callable[[World, Fault], Sequence[str]]

KINDS: dict[str, Kind] = {
    "kill service": partial(processes.kill, processes.service),
    "kill rank": partial(processes.kill, processes.rank),
    "kill all ranks": partial(processes.kill, processes.all_ranks),
    "kill TorchRec rank": partial(processes.kill, processes.torchrec_rank),
    "kill replica": partial(processes.kill, processes.replica),
    "kill all replicas": partial(processes.kill, processes.replicas),
    "kill everything": partial(processes.kill, processes.everything),
    "freeze service": partial(processes.freeze, processes.service),
    "freeze rank": partial(processes.freeze, processes.rank),
    "freeze all ranks": partial(processes.freeze, processes.all_ranks),
    "freeze replica": partial(processes.freeze, processes.replica),
    "restart service": processes.restart_service,
    "service away": processes.service_away,
    "rank leaves": partial(processes.leave, processes.rank),
    "replica leaves": partial(processes.leave, processes.replica),
    "backup restored": backups.put_back,
    "backup damaged": backups.damage_backup,
    "kill restore": backups.put_back_after_kill,
    "directory put back by hand": backups.put_back_by_hand,
    "disk full": disk.fill_disk,
    "disk slow": disk.slow_disk,
    "bit flipped at rest": disk.flip,
    "bit flipped under the service": disk.flip_under_service,
    "bit flipped in memory": disk.flip_row,
    "connection cut": network.cut,
    "connection half-open": network.half_open,
    "connection dead behind a proxy": network.dead_proxy,
    "connection delayed": network.delay,
    "slow reader": network.slow_reader,
    "storage hangs": network.hang_storage,
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
    "version kept": versions.keep_version,
    "version followed": versions.follow_version,
    "objection": versions.object_to_version,
    "model rolled back": versions.roll_back,
    "clock set": operators.set_clock,
    **{kind: partial(kill, step) for kind, (kill, step) in KILLS.items()},
}

# They wait for their moment, and begin when they end.
SUDDEN = {*KILLS, "connection dead behind a proxy"}


def kinds_of(fleet: Fleet) -> list[str]:
    """The kinds that can happen to a fleet."""
    needs = {"kill TorchRec rank": bool(fleet.clicks), "storage hangs": fleet.storage}
    return sorted(kind for kind in KINDS if needs.get(kind, True))
