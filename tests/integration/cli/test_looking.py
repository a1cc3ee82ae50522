"""What operators look at with the command: the same as over HTTP, from one address."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.command import deltasync
from tests.support.deployments import COMMAND
from tests.support.fleet import WAIT, Trainer, follow, wait_for_lag, wait_until_in_sync
from tests.support.programs import killed
from tests.support.server import RunningService

from deltasync.cli.status import BEHIND
from deltasync.client import NumpyTarget
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    """One that has published two versions; "predictors" has a replica, "probes" has none."""
    with (
        RunningService(
            tmp_path / "data", policies={"mobile": Policy(top_k=5), "audit": Policy(mode=Mode.IDS)}
        ) as service,
        Trainer(service.grpc) as trainer,
        follow(service, "predictors", "p", NumpyTarget()),
    ):
        trainer.publish_all()
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        yield service


def shown(*arguments: str) -> str:
    code, out, err = deltasync(*arguments)
    assert (code, err) == (0, ""), err
    return out


@contextmanager
def interruptible(*arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A command that obeys SIGINT, also if this process ignores it: a shell's background jobs do, and children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    with killed(process):
        yield process


def test_one_address_does_for_all(service: RunningService) -> None:
    at = ("--service", service.http)
    assert "clicks" in shown("status", *at)
    assert "predictors" in shown("lag", *at)
    assert "head 2" in shown("lag", "predictors", *at)
    assert "rank joined" in shown("events", *at)
    code, _, said = deltasync("consumers", "pause", "nobody", *at, admin_token="secret")  # noqa: S106
    assert (code, "no consumer 'nobody'" in said) == (1, True)


def test_the_newest_checkpoints_are_listed(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        (found,) = json.loads(shown("checkpoints", "--json", "--service", service.http))
        known = [found[name] for name in ("version", "behind_versions", "age_seconds", "reason")]
        assert known == [0, 1, None, ""]
        code, said, _ = deltasync("checkpoint", "clicks", "--service", service.http, admin_token="secret")  # noqa: S106
        assert (code, "the checkpoint of version 1 of model clicks is complete" in said) == (0, True)
        trainer.publish_all()
        titles, line = shown("checkpoints", "--service", service.http).splitlines()
        assert titles.split() == ["model", "version", "behind", "age", "bytes", "new", "at", "URL", "why"]
        assert line.split()[:3] == ["clicks", "1", "1"]


@pytest.mark.parametrize(
    ("command", "route"),
    [
        (["lag", "predictors"], "/consumers/predictors"),
        (["lag"], "/consumers"),
        (["cuts"], "/versions"),
        (["events"], "/events?last=20"),
        (["consumers", "list"], "/consumers"),
        (["tables", "list"], "/tables"),
        (["status"], "/status"),
    ],
)
def test_programs_are_given_the_names_of_http(service: RunningService, command: list[str], route: str) -> None:
    said = json.loads(shown(*command, "--json", "--service", service.http))
    wanted = service.get_json(route)
    assert _names(said) == _names(wanted)


def _names(answer: object) -> object:
    """The names in an answer, however its values change."""
    if isinstance(answer, dict):
        return {name: _names(value) for name, value in answer.items() if name not in ("subject", "events")}
    return [_names(each) for each in answer[:1]] if isinstance(answer, list) else None


def test_one_screen_says_what_is_wrong(service: RunningService) -> None:
    text = shown("status", "--service", service.http)
    assert "ready" in text
    lines = [line.split() for line in text.splitlines() if line]
    titles = next(line for line in lines if line[:3] == ["model", "version", "step"])
    assert "ranks" in titles
    order = [line[0] for line in lines if line[0] in ("mobile", "predictors", "probes")]
    assert order[:3] == ["mobile", "probes", "predictors"]  # Those that nobody follows first.
    cuts = next(line for line in lines if line[:2] == ["model", "version"] and "gather" in line)
    assert cuts[-2:] == ["release", "ack"]


def test_a_script_is_told_whether_consumers_are_too_far_behind(service: RunningService) -> None:
    at = ("--service", service.http)
    assert deltasync("lag", "predictors", "--max-seconds", "5", *at)[0] == 0
    code, _, said = deltasync("lag", "--max-seconds", "5", *at)
    assert (code, "consumer probes is empty: no replica" in said) == (BEHIND, True)
    assert deltasync("lag", "nobody", "--max-seconds", "5", *at)[0] == 1


def test_replicas_are_listed_with_what_is_wrong(service: RunningService) -> None:
    (titles, line) = shown("replicas", "list", "--service", service.http).splitlines()
    assert titles.split()[:3] == ["consumer", "replica", "state"]
    assert line.split()[:3] == ["predictors", "p", "connected"]
    assert shown("replicas", "list", "probes", "--service", service.http) == "no replicas\n"


def test_tables_are_listed(service: RunningService) -> None:
    lines = [line.split() for line in shown("tables", "list", "clicks", "--service", service.http).splitlines()]
    assert [line[1] for line in lines] == ["table", "user", "item"]


@pytest.mark.parametrize("command", [("tables", "list"), ("cuts",)])
def test_a_model_that_there_is_not_is_an_error(service: RunningService, command: tuple[str, ...]) -> None:
    code, out, err = deltasync(*command, "clocks", "--service", service.http)
    assert (code, out) == (1, "")
    assert "no model 'clocks'; models: clicks" in err


@pytest.mark.parametrize("consumer", ["predictors", "mobile", "audit"])
def test_releases_are_shown_as_they_pass(service: RunningService, consumer: str) -> None:
    text = shown("tail", consumer, "--count", "1", "--rows", "2", "--service", service.grpc)
    head, *tables = text.splitlines()
    assert "version 2, everything: 100 rows" in head
    assert [line.split(":")[0].strip() for line in tables if ":" in line] == ["user", "item"]
    assert sum("norm" in line for line in tables) == 4
    said = json.loads(shown("tail", consumer, "--count", "1", "--json", "--service", service.grpc))
    assert (said["version"], said["rows"]) == (2, 100)
    names = {each["replica"] for each in service.get_json(f"/consumers/{consumer}")["replicas"]}
    assert names <= {"p"}  # It has said goodbye.
    code, _, err = deltasync("tail", "nobody", "--service", service.grpc)
    assert (code, "no consumer 'nobody'" in err) == (1, True)


def test_of_rows_without_values_the_norm_of_what_has_changed_is_shown(service: RunningService) -> None:
    at = ("--count", "1", "--rows", "100", "--json", "--service", service.grpc)
    tables = [json.loads(shown("tail", name, *at))["tables"] for name in ("audit", "predictors")]
    audit, predictors = ([row for table in each.values() for row in table["shown"]] for each in tables)
    assert len(audit) == 100
    assert [row["id"] for row in audit] == [row["id"] for row in predictors]
    # Everything has changed since there was nothing.
    assert [row["norm"] for row in audit] == pytest.approx([row["norm"] for row in predictors])


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_ends_tail_leaves_no_replica_behind(service: RunningService, ended_by: signal.Signals) -> None:
    with interruptible("tail", "predictors", "--service", service.grpc) as process:
        assert process.stdout
        assert b"version 2" in process.stdout.readline()
        wait_for_lag(service, "predictors", lambda lag: [each["offset"] for each in lag["replicas"]] == [2, 2])
        process.send_signal(ended_by)
        assert process.wait(WAIT) == (-signal.SIGKILL if ended_by == signal.SIGKILL else 0)
    wait_for_lag(service, "predictors", lambda lag: [each["replica"] for each in lag["replicas"]] == ["p"])


def test_a_hint_says_how_to_show_who_one_is(service: RunningService) -> None:
    code, _, said = deltasync("consumers", "delete", "mobile", "--service", service.http)
    assert (code, "DELTASYNC_TOKEN, --token-file" in said) == (1, True)


def test_what_is_watched_goes_on_until_it_is_stopped(service: RunningService) -> None:
    with interruptible("lag", "--watch", "--service", service.http) as process:
        assert process.stdout
        for _ in range(2):
            while not process.stdout.readline().startswith(b"predictors"):
                assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT) == 0
