"""`deltasync verify`: replicas read their rows again, and the service compares their checksums."""

import json

from tests.support.command import deltasync
from tests.support.fleet import (
    USER,
    WAIT,
    Recorder,
    Trainer,
    follow,
    lost,
    wait_for_lag,
    wait_until_in_sync,
    without_sweep,
)
from tests.support.server import RunningService
from torch import nn

from deltasync.cli.lag import BEHIND
from deltasync.client import CallbackTarget, Policy
from deltasync.client.targets.torch_target import TorchTarget

POLICIES: dict[str, Policy] = {}


def verify(service: RunningService, *arguments: str) -> tuple[int, str, str]:
    return deltasync("verify", "predictors", "--service", service.http, *arguments, token="secret")  # noqa: S106


def test_the_command_names_the_replica_and_table_that_differ(service: RunningService, trainer: Trainer) -> None:
    code, _, said = verify(service)
    assert (code, "consumer 'predictors' has no replicas" in said) == (1, True)
    good, bad = Recorder(), Recorder()
    with (
        follow(service, "predictors", "good", good, without_sweep),
        follow(service, "predictors", "bad", bad, without_sweep),
    ):
        position = trainer.publish_all()
        wait_until_in_sync(service, "predictors", position, replicas=2)
        code, shown, said = verify(service)
        assert (code, shown.count(" equal ")) == (0, 4)
        assert said.splitlines() == [f"replica {name} is reading its rows again" for name in ("bad", "good")]
        bad.tables["user"][7, 0] += 1
        code, shown, _ = verify(service)
        assert (code, shown.count(" equal "), shown.count(" differs ")) == (BEHIND, 3, 1)
        assert "bad " in next(line for line in shown.splitlines() if "differs" in line)
        wait_until_in_sync(service, "predictors", position, replicas=2)
        assert verify(service, "--replica", "bad")[0] == 0
    with follow(service, "predictors", "looks", Recorder(), guest=True) as guest:
        guest.wait_for(position, WAIT)
        assert "has no replicas" in verify(service)[2]  # Of guests nobody is asked.


def test_a_replica_that_shows_nothing_hides_no_other(service: RunningService, trainer: Trainer) -> None:
    module = nn.Module()
    module.user = nn.EmbeddingBag(USER.rows, USER.dim)
    position = trainer.publish_all()
    with lost(follow(service, "predictors", "away", Recorder())) as away:
        away.wait_for(position, WAIT)
    with (
        follow(service, "predictors", "good", Recorder()) as good,
        follow(service, "predictors", "plain", CallbackTarget(lambda _: None)) as plain,
        follow(service, "predictors", "part", TorchTarget(module, leave_out=["item"])) as part,
    ):
        for each in (good, plain, part):
            each.wait_for(position, WAIT)
        wait_for_lag(service, "predictors", lambda lag: [each["offset"] for each in lag["replicas"]] == 4 * [1])
        code, shown, _ = verify(service, "--json")
        found = json.loads(shown)
        assert (code, {(each["replica"], each["table"]): each["status"] for each in found}) == (
            BEHIND,
            {
                ("away", ""): "not shown",
                ("good", "user"): "equal",
                ("good", "item"): "equal",
                ("part", "user"): "equal",
                ("part", "item"): "not held",
                ("plain", "user"): "not shown",
                ("plain", "item"): "not shown",
            },
        )
        assert all(bool(each["held"]) == (each["status"] == "equal") for each in found)
        why = {each["replica"]: each["reason"] for each in found}
        assert "away for" in why["away"]
        code, shown, _ = verify(service)
        assert (code, shown.count("away for"), shown.count(" equal ")) == (BEHIND, 1, 3)
        assert "None" not in shown
        assert verify(service, "--replica", "good")[0] == 0
        for name in ("part", "plain", "old", "away", "nobody"):
            code, shown, _ = verify(service, "--replica", "good", "--replica", name)
            assert (code, shown.count(" equal ")) == (BEHIND, 3 if name == "part" else 2), name


def test_without_a_right_there_is_one_error(service: RunningService, trainer: Trainer) -> None:
    trainer.publish_all()
    code, shown, said = deltasync("verify", "predictors", "--replica", "a", "--service", service.http)
    assert (code, shown, "DELTASYNC_TOKEN" in said) == (1, "", True)
