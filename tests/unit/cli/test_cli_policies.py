"""A policy on the command line and in the configuration file, and a lag as text."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from click.testing import CliRunner

from deltasync.cli import consumers
from deltasync.cli.main import cli
from deltasync.cli.status import lag_lines
from deltasync.client import Endpoint
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode
from deltasync.core.value_types import ValueType
from deltasync.service.options import ServiceOptions
from deltasync.status.records import ConsumerStatus, Freshness, Lag, ReleaseLag, ReplicaStatus, TableLag

EVERYTHING = Policy(
    tables=("user*", "item"),
    mode=Mode.IDS,
    top_k=0.25,
    top_k_per_table=True,
    max_age_seconds=60.0,
    min_interval_seconds=1.5,
    max_bytes=4000,
    value_type=ValueType.BF16,
)
FLAGS = ["--tables", "user*", "--tables", "item", "--mode", "ids", "--top-k", "0.25", "--top-k-per-table"]
FLAGS += ["--max-age", "60", "--min-interval", "1.5", "--max-bytes", "4000", "--value-type", "bf16"]


def test_the_words_of_a_policy_are_what_differs_from_the_default() -> None:
    assert Policy().description == ""
    tenth = Policy(top_k=0.1, value_type=ValueType.INT8)
    assert tenth.description == "top_k=10 % of the changed rows, value_type=int8"
    assert Policy(top_k=1234567).description == "top_k=1234567 rows"
    assert Policy(top_k=1).description == "top_k=1 row"
    assert EVERYTHING.description == (
        "tables=user*,item, mode=ids, top_k=25 % of the changed rows, top_k_per_table, max_age_seconds=60, "
        "min_interval_seconds=1.5, max_bytes=4000, value_type=bf16"
    )


class RecordedAdmin:
    """What the command line would have asked a service for."""

    calls: list[tuple[Any, ...]]

    def __init__(self, service: Endpoint) -> None:
        self._at = (service.address, service.token)

    def create_consumer(self, name: str, model: str, policy: Policy) -> dict[str, Any]:
        self.calls.append(("create", *self._at, name, model, policy))
        return {
            "consumer": name,
            "paused": {} if model != "held" else {"by": "anna"},
            "reason": "paused since then",
        }

    def update_consumer(self, name: str, policy: Policy) -> None:
        self.calls.append(("update", *self._at, name, policy))

    def consumer(self, name: str) -> dict[str, Any]:
        updates = [call[-1] for call in self.calls if call[0] == "update"]
        return {"consumer": name, "policy": (updates[-1] if updates else Policy(top_k=5)).as_dict()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    RecordedAdmin.calls = []
    monkeypatch.setattr(consumers, "Admin", RecordedAdmin)
    return RecordedAdmin.calls


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    done = CliRunner().invoke(
        cli, arguments, env={f"DELTASYNC_{name.upper()}": v for name, v in environment.items()}
    )
    return done.exit_code, done.output


def test_a_consumer_is_made_with_the_policy_of_the_flags(calls: list[tuple[Any, ...]]) -> None:
    done = run("consumers", "create", "c", "--model", "m", *FLAGS, http="http://localhost:1", admin_token="t")  # noqa: S106
    assert done == (0, f"consumer c follows model m: {EVERYTHING.description}\n")
    assert calls == [("create", "http://localhost:1", "t", "c", "m", EVERYTHING)]
    _, said = run("consumers", "create", "c", "--model", "held", http="http://localhost:1", admin_token="t")  # noqa: S106
    assert said == "consumer c follows model held: paused since then\n"


def test_an_update_replaces_the_policy_whole_and_says_so(calls: list[tuple[Any, ...]]) -> None:
    assert run("consumers", "update", "c", "--top-k", "5") == (0, "policy of consumer c: top_k=5 rows\n")
    said = "policy of consumer c: every changed row, in its own type (was top_k=5 rows)\n"
    assert run("consumers", "update", "c") == (0, said)
    assert [call[-1] for call in calls] == [Policy(top_k=5), Policy()]
    assert "Replace the whole policy of consumer NAME" in " ".join(run("consumers", "update", "--help")[1].split())


def test_settings_of_a_policy_may_be_in_the_environment(calls: list[tuple[Any, ...]]) -> None:
    assert run("consumers", "update", "c", top_k="0.5", max_age="9", tables="a b")[0] == 0
    assert calls[0][-1] == Policy(top_k=0.5, max_age_seconds=9, tables=("a", "b"))


BAD_FLAGS = [
    (["--top-k", "1.5"], "top_k 1.5: expected a whole number of rows such as 10, without a point"),
    (["--top-k", "1.0"], "top_k 1.0: expected a whole number of rows such as 10, without a point"),
    (["--top-k", "0"], "top_k 0: expected"),
    (["--top-k", "nan"], "top_k nan: expected"),
    (["--top-k", "many"], "Invalid value for '--top-k'"),
    (["--max-age", "-1"], "max_age_seconds -1: expected more than 0"),
    (["--max-age", "1", "--min-interval", "5"], "max_age_seconds 1 is shorter than min_interval_seconds 5"),
    (["--max-bytes", "0"], "max_bytes 0: expected a whole number of bytes, at least 1"),
    (["--max-bytes", "99", "--top-k", "10"], "max_bytes 99 is less than the 100 bytes"),
    (["--tables", ""], "name at least one pattern"),
    (["--mode", "rows"], "Invalid value for '--mode'"),
    (["--value-type", "fp64"], "Invalid value for '--value-type'"),
]


@pytest.mark.parametrize("command", [["create", "c", "--model", "m"], ["update", "c"]], ids=["create", "update"])
@pytest.mark.parametrize(("flags", "said"), BAD_FLAGS, ids=[" ".join(flags) for flags, _ in BAD_FLAGS])
def test_a_policy_that_cannot_be_is_a_wrong_use(
    calls: list[tuple[Any, ...]], command: list[str], flags: list[str], said: str
) -> None:
    code, output = run("consumers", *command, *flags)
    assert code == 2
    assert said in output
    assert calls == []


def serve_with(path: Path, content: str, *arguments: str) -> tuple[int, str]:
    path.write_text(content)
    return run("serve", "--config", str(path), *arguments)


def test_consumers_of_the_file_have_the_policy_it_says(served: list[ServiceOptions], tmp_path: Path) -> None:
    content = """
        [consumers.top]
        model = "m"
        top_k = 0.1
        value_type = "int8"
        [consumers."all.of-it"]
        model = "n"
        tables = ["user*", "item"]
        mode = "ids"
        top_k = 0.25
        top_k_per_table = true
        max_age_seconds = 60
        min_interval_seconds = 1.5
        max_bytes = 4_000
        value_type = "bf16"
        [consumers.default]
        model = "m"
    """
    code, output = serve_with(tmp_path / "c.toml", content)
    assert code == 0, output
    assert served[0].consumers == (
        ConsumerOptions("top", "m", Policy(top_k=0.1, value_type=ValueType.INT8)),
        ConsumerOptions("all.of-it", "n", EVERYTHING),
        ConsumerOptions("default", "m", Policy()),
    )


def test_a_consumer_of_flag_and_file_has_the_policy_of_the_file(
    served: list[ServiceOptions], tmp_path: Path
) -> None:
    content = '[consumers.c]\nmodel = "m"\ntop_k = 3'
    assert serve_with(tmp_path / "c.toml", content, "--consumer", "c=m", "--consumer", "d=m")[0] == 0
    assert served[0].consumers == (ConsumerOptions("d", "m"), ConsumerOptions("c", "m", Policy(top_k=3)))
    code, output = serve_with(tmp_path / "c.toml", content, "--consumer", "c=other")
    assert code == 2
    assert "consumer 'c': model 'other' in --consumer, but 'm' in [consumers.c] of the --config file" in (
        " ".join(output.split())
    )
    assert len(served) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("consumers = 3", "consumers: expected tables [consumers.NAME]"),
        ('consumers = ["c=m"]', "consumers: expected tables [consumers.NAME]"),
        ('[[consumers]]\nmodel = "m"', "consumers: expected tables [consumers.NAME]"),
        ("consumers.c = 3", "[consumers.c]: expected a table"),
        ("[consumers.c]", "[consumers.c]: model: expected the name of a model"),
        ("[consumers.c]\nmodel = 3", "[consumers.c]: model: expected the name of a model, got 3"),
        ('[consumers.c]\nmodel = "m/n"', "[consumers.c]: model name 'm/n'"),
        ('[consumers."a b"]\nmodel = "m"', "[consumers.a b]: consumer name 'a b'"),
        (
            '[consumers.c]\nmodel = "m"\ntopk = 3',
            "[consumers.c]: policy: unknown key 'topk'; keys: max_age_seconds",
        ),
        ('[consumers.c]\nmodel = "m"\ntop_k = "3"', "[consumers.c]: top_k '3': expected a number"),
        ('[consumers.c]\nmodel = "m"\ntop_k = inf', "[consumers.c]: top_k inf: expected a whole number of rows"),
        ('[consumers.c]\nmodel = "m"\ntables = "*"', "[consumers.c]: tables '*': expected a list of patterns"),
        ('[consumers.c]\nmodel = "m"\nmode = []', "[consumers.c]: mode []: expected one of embeddings, ids"),
        ('[consumers.c]\nmodel = "m"\nvalue_type = "x"', "[consumers.c]: value_type 'x': expected one of fp32"),
        ('[consumers.c]\nmodel = "m"\n[consumers.c]', "Cannot declare"),
    ],
)
def test_a_wrong_consumer_is_an_error_that_names_file_consumer_and_key(
    served: list[ServiceOptions], tmp_path: Path, content: str, said: str
) -> None:
    code, output = serve_with(tmp_path / "c.toml", content)
    assert code == 2
    assert f"{tmp_path}/c.toml: " in output
    assert said in output
    assert not served


def test_a_file_that_is_no_text_is_an_error_that_names_it(served: list[ServiceOptions], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    code, output = run("serve", "--config", str(tmp_path / "c.toml"))
    assert code == 2
    assert f"{tmp_path}/c.toml: " in output
    assert not served


KNOWN = Lag(3, 20, 800, 7.5, 2.5, 0.0125)
UNKNOWN = Lag(4, 30, 1200, 9.5)
RELEASE = ReleaseLag(
    number=9,
    version=11,
    seconds_ago=0.5,
    rows=7,
    bytes=280,
    norm=4.0,
    left_rows=63,
    left_bytes=2520,
    left_norm=12.3456,
    reason="took 7 of 70 dirty rows: top_k 10 % takes those that have changed most",
)
RANKED = ConsumerStatus(
    consumer="top",
    model="clicks",
    history="h",
    state="behind",
    reason="20 rows are still to be applied",
    head=12,
    head_step=1200,
    offset=9,
    lag=KNOWN,
    replicas=[
        ReplicaStatus(
            replica="p0",
            state="connected",
            since_seconds=1.0,
            connected=True,
            offset=9,
            lag=KNOWN,
            seconds_since_ack=1.0,
            checked=True,
            damaged=[],
            unbound=[],
        ),
        ReplicaStatus(
            replica="p1",
            since_seconds=3.0,
            connected=False,
            offset=8,
            lag=UNKNOWN,
            seconds_since_ack=1.0,
            checked=False,
            damaged=["u"],
            unbound=["item"],
            state="away",
            reason="away for 3 s: its stream has ended",
        ),
    ],
    tables=[TableLag("user", 15, 600, 7.5, 2.0, 0.5), TableLag("item", 5, 200)],
    oldest_row_seconds=7.5,
    damages=0,
    release=RELEASE,
    policy=Policy(top_k=0.1).as_dict(),
    policy_words=Policy(top_k=0.1).description,
    freshness=Freshness([], 0),
)


@pytest.mark.parametrize(("held", "shown"), [(8.25, "8.25 seconds ago"), (None, "unknown")])
def test_the_lag_says_how_old_the_newest_event_is(held: float | None, shown: str) -> None:
    lag = replace(RANKED, lag=replace(KNOWN, seconds_behind_events=held), head_seconds_behind_events=2.5)
    lines = [" ".join(line.split()) for line in lag_lines(asdict(lag))]
    newest = "events newest event in the newest version: 2.5 seconds ago; in the slowest replica: "
    assert newest + shown in lines


def test_the_lag_of_a_consumer_with_a_policy_says_what_is_unsent_and_why() -> None:
    facts, replicas, tables = (part.splitlines() for part in "\n".join(lag_lines(asdict(RANKED))).split("\n\n"))
    assert facts[:2] == ["consumer top  model clicks  head 12  behind", "20 rows are still to be applied"]
    assert [" ".join(line.split()) for line in facts[2:]] == [
        "policy top_k=10 % of the changed rows",
        "lag 3 versions, 20 rows, 800 B, 7.5 s",
        "offset 9, counted in releases",
        "release 9 of version 11, 0.5 seconds ago",
        "took 7 of 70 dirty rows: top_k 10 % takes those that have changed most",
        "took 7 rows, 280 bytes, norm 4",
        "left 63 rows, 2520 bytes, norm 12.35",
        "oldest row 7.5 seconds unsent",
        "unsent norm 2.5, 1.25 % of the tables'",
    ]
    assert [line.split()[:7] for line in replicas[1:]] == [
        ["p0", "connected", "1", "s", "9", "3", "20"],
        ["p1", "away", "3", "s", "8", "4", "30"],
    ]
    assert replicas[2].endswith("away for 3 s: its stream has ended")
    assert [line.split() for line in tables[1:]] == [
        ["user", "15", "600", "B", "7.5", "s", "2", "50", "%"],
        ["item", "5", "200", "B"],
    ]


def test_columns_of_a_lag_stand_under_their_titles() -> None:
    titles, first, _ = "\n".join(lag_lines(asdict(RANKED))).split("\n\n")[1].splitlines()
    for title, cell in {"offset": "9", "versions": "3", "rows": "20"}.items():
        end = titles.index(title) + len(title)
        assert first[:end].endswith(f" {cell}"), title


def test_what_is_unsent_and_not_known_is_not_told_as_nothing() -> None:
    text = lag_lines(asdict(replace(RANKED, lag=UNKNOWN, offset=8)))
    assert "unsent      unknown until the newest release is applied" in text
    # After a restart, or while no replica is connected.
    text = lag_lines(asdict(replace(RANKED, lag=UNKNOWN, offset=9)))
    assert "unsent      unknown until the next release is made" in text


def test_the_lag_of_a_consumer_without_a_policy_has_nothing_of_releases() -> None:
    plain = replace(RANKED, release=None, policy_words="", replicas=[], tables=[TableLag("user", 15, 600)])
    lines = [" ".join(line.split()) for line in lag_lines(asdict(plain))]
    assert lines[2:] == ["lag 3 versions, 20 rows, 800 B, 7.5 s", "", ANY, "user 15 600 B"]


@pytest.mark.parametrize("text", ["", "m", "20", "20 weeks", "xm"])
def test_a_duration_needs_a_number_and_a_unit(text: str) -> None:
    done = CliRunner().invoke(consumers.consumers, ["follow", "fleet", "--after", "canary", "--behind", text])
    assert done.exit_code == 2
    assert "expected a number with a unit: 30s, 20m, 2h or 1d" in " ".join(done.output.split())
