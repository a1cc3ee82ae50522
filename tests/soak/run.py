"""A soak from its first process to its verdict."""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tests.soak.faults import backups, versions
from tests.soak.faults.kinds import kinds_of
from tests.soak.fleet import CLICKS, Follower, fleet_of
from tests.soak.leftovers import directory_bytes, leftovers
from tests.soak.play import Player
from tests.soak.rank import stop_file
from tests.soak.replica import held_file
from tests.soak.report import build_report, sound
from tests.soak.schedule import Fault, SoakOptions, schedule
from tests.soak.verdict import Trained, trained_clicks, trained_plain, unequal
from tests.soak.world import REDIS, SERVICE, SoakFailed, World
from tests.support.object_storage import PROGRAM as WEED

from deltasync.checkpoints.kept_version import KEPT
from deltasync.log.data_directory import CHECKPOINTS
from deltasync.trainer.example.results import Tables

_READY_SECONDS, _END_SECONDS, _SYNC_SECONDS = 300.0, 300.0, 300.0
_POLL_SECONDS = 0.2
# Of a model: the service then keeps none that were made before.
_CHECKPOINTS = 3
# Consumers that hold whole versions, one of each model: who follows them last shows what the service has.
_WHOLE = ("whole", "lone", CLICKS)


def run_soak(options: SoakOptions, console: Console) -> dict[str, Any]:
    """Run everything; what was found."""
    folder = Path(tempfile.mkdtemp(prefix="deltasync-soak-"))
    console.print(f"logs and journals: {folder}", highlight=False, soft_wrap=True)
    _log_to(folder / "soak.log")
    report = _Soak(options, folder, console).run()
    if sound(report) and not options.keep:
        shutil.rmtree(folder)
        report["logs"] = ""
    return report


def _log_to(file: Path) -> None:
    """Have what this process logs in a file, as that of all others is, and not between the lines of the report."""
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    for name in ("deltasync", "tests.soak"):
        ours = logging.getLogger(name)
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False


class _Soak:
    def __init__(self, options: SoakOptions, folder: Path, console: Console) -> None:
        self._options = options
        self._folder = folder
        self._console = console
        # With copies, damage on disk costs nothing, and a service that is put back loses less: so not always.
        storage = WEED is not None and options.seed % 2 == 0
        self._fleet = fleet_of(small=options.small, redis=REDIS is not None, storage=storage)
        self._problems: list[str] = []
        self._late = [
            Follower(f"late-{each.name}", each.name, each.stores[0])
            for each in self._fleet.subscriptions
            if each.name in _WHOLE
        ]

    def run(self) -> dict[str, Any]:
        kinds = kinds_of(self._fleet)
        faults = schedule(self._options.seed, self._options.seconds, kinds, self._options.mean_gap)
        with World(self._fleet, self._folder) as world:
            player = Player(world)
            self._say("starting the service, trainers and replicas")
            world.start()
            self._await(world, self._begun, _READY_SECONDS, "the first rows of all replicas")
            player.play(faults, self._say)
            self._end(world)
            policies, number = world.policies(), sum(world.heads().values())
            world.crew.dismiss([SERVICE])
            trained = self._trained(world)
            differing = {
                each.name: unequal(trained[self._model_of(each)], policies[each.consumer], self._held(each))
                for each in [*self._fleet.followers, *self._late]
            }
        return build_report(
            world,
            player,
            kinds=kinds,
            differing=differing,
            problems=self._problems,
            versions=number,
            late=[each.name for each in self._late],
            leftovers=leftovers(world.data_dir),
            directory=(directory_bytes(world.data_dir), world.largest_directory),
            options=self._options,
        )

    def _end(self, world: World) -> None:
        """Have trainers publish their last step; replicas hold it, and so does the service after a last kill, and
        after a backup of it was restored.
        """
        self._say("no more faults: trainers publish their last steps")
        world.resume_all()
        for model in world.plain.values():
            model.end()
        if self._fleet.clicks:
            stop_file(self._folder, CLICKS).touch()
        self._await(world, self._trainers_ended, _END_SECONDS, "the trainers' end")
        self._say("waiting until all consumers are in sync")
        self._await(world, self._in_sync, _SYNC_SECONDS, "all consumers in sync")
        self._say("the service is killed once more; new replicas show what it holds")
        world.crew.kill([SERVICE])
        for follower in self._late:
            world.follow(follower)
        self._await(world, self._late_there, _SYNC_SECONDS, "new replicas")
        self._await(world, self._in_sync, _SYNC_SECONDS, "all consumers in sync after the last kill")
        self._say("what was damaged is replaced by new checkpoints; the service goes on from a backup of itself")
        self._check(world)  # No checkpoint is built upon what is known to be damaged.
        models = sorted({each.model for each in self._fleet.subscriptions})
        for name in models:
            versions.release(world, name, world.call(lambda admin, name=name: admin.kept_versions(name)))  # type: ignore[misc]
        for record in world.data_dir.glob(f"{CHECKPOINTS}/*/{KEPT}/*"):
            record.unlink()  # It is damaged, so nobody can release that version.
        for name in models * _CHECKPOINTS:
            world.call(lambda admin, name=name: admin.make_checkpoint(name))  # type: ignore[misc]
        self._problems += self._check(world)
        backups.put_back(world, Fault(at=0, kind="backup restored", pick=0, seconds=0))
        self._await(world, self._in_sync, _SYNC_SECONDS, "all consumers in sync after a backup was restored")
        self._problems += self._check(world)
        world.crew.dismiss(name for name in world.crew.names() if name != SERVICE)

    def _await(self, world: World, there: Callable[[World], str], seconds: float, what: str) -> None:
        """Wait until `there` names nothing any more that is missing."""
        deadline = time.monotonic() + seconds
        while missing := there(world):
            if time.monotonic() > deadline:
                found = "; ".join(world.crew.troubles)
                raise SoakFailed(f"{what}: not within {seconds:.0f} s: {missing}; {found}; see {self._folder}")
            time.sleep(_POLL_SECONDS)

    def _check(self, world: World) -> list[str]:
        """What `deltasync fsck` reports, in words."""
        found = world.call(lambda admin: admin.fsck())
        return [problem for each in found for problem in each["problems"]]

    def _begun(self, world: World) -> str:
        for subscription in self._fleet.subscriptions:
            lag = world.lag(subscription.name)
            held = {each["replica"] for each in lag["replicas"] if each["offset"]} if lag else set[str]()
            if missing := {each.name for each in subscription.replicas} - held:
                return f"{', '.join(sorted(missing))} has none"
        return ""

    def _in_sync(self, world: World) -> str:
        if not world.ready():
            return "/readyz does not say that the service is ready"
        for subscription in self._fleet.subscriptions:
            lag = world.lag(subscription.name)
            if lag is None:
                return "the service does not answer"
            here = {each["replica"] for each in lag["replicas"] if each["connected"]}
            if missing := {each.name for each in subscription.replicas} - here:
                return f"{subscription.name}: {', '.join(sorted(missing))} is not connected"
            if lag["state"] not in ("in sync", "delivered") or not lag["head"]:
                return f"{subscription.name}: {lag['state']}: {lag['reason']}"
        return ""

    def _late_there(self, world: World) -> str:
        for follower in self._late:
            lag = world.lag(follower.consumer)
            names = {each["replica"] for each in lag["replicas"] if each["connected"]} if lag else set[str]()
            if follower.name not in names:
                return f"{follower.name} is not connected"
        return ""

    def _trainers_ended(self, world: World) -> str:
        trainers = [f"{model}-" for model in world.plain] + [f"{CLICKS}-rank"]
        followers = {each.name for each in self._fleet.followers}
        running = {name for prefix in trainers for name in world.crew.names(prefix)} - followers
        return f"{', '.join(sorted(running))} still run" if running else ""

    def _trained(self, world: World) -> dict[str, Trained]:
        found = {
            name: trained_plain(self._folder, name, model.runs, world.put_back_unix_ns)
            for name, model in world.plain.items()
        }
        return found | ({CLICKS: trained_clicks(self._folder, self._fleet.clicks)} if self._fleet.clicks else {})

    def _model_of(self, follower: Follower) -> str:
        return self._fleet.subscription(follower.consumer).model

    def _held(self, follower: Follower) -> Tables:
        file = held_file(self._folder, follower.name)
        if not file.exists():
            return {}
        with np.load(file) as arrays:
            return dict(arrays)

    def _say(self, what: str) -> None:
        self._console.print(what, highlight=False, soft_wrap=True)
