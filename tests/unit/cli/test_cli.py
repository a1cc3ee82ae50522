import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deltasync.access.limits import LimitOptions
from deltasync.cli.endpoint_options import operator_options, service_options, suggested
from deltasync.cli.main import cli
from deltasync.client import Endpoint
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import Policy
from deltasync.cuts.norm_guard import NormLimit
from deltasync.log.brokers import BrokerOptions
from deltasync.service.options import ServiceOptions

FLAG, FILE = "--grpc-port", "grpc_port"


def serve(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(cli, ["serve", *arguments], env=env)


@pytest.mark.parametrize(
    ("flag", "env", "file", "port"),
    [
        (None, None, None, 50051),
        (None, None, 3, 3),
        (None, 2, 3, 2),
        (1, 2, 3, 1),
        (1, None, 3, 1),
        (1, 2, None, 1),
        (0, 2, 3, 0),
    ],
)
def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    served: list[ServiceOptions], tmp_path: Path, flag: int | None, env: int | None, file: int | None, port: int
) -> None:
    arguments = [] if flag is None else ["--grpc-port", str(flag)]
    if file is not None:
        (tmp_path / "c.toml").write_text(f"grpc_port = {file}")
        arguments += ["--config", str(tmp_path / "c.toml")]
    done = serve(*arguments, env={} if env is None else {"DELTASYNC_GRPC_PORT": str(env)})
    assert done.exit_code == 0, done.output
    assert served[0].grpc_port == port


def test_a_file_may_have_settings_of_every_kind(served: list[ServiceOptions], tmp_path: Path) -> None:
    content = """
        data_dir = "/data"
        host = "0.0.0.0"
        grpc_port = 1
        http_port = 2
        admin_token = "t"
        admin_token_file = "t.txt"
        roles = "roles.toml"
        insecure = true
        log_max_bytes = 8_000_000
        checkpoint_bytes = 3
        replica_retention_seconds = 4.5
        drain_seconds = 6
        max_norm_growth = 50
        poisoned = "quarantine"
        tls_cert = "c.pem"
        tls_key = "k.pem"
        tls_client_ca = "ca.pem"
        log = "nats://b1:4222,nats://b2:4222"
        log_replicas = 1
        log_prefix = "test"
        log_monitor = "http://b1:8222"
        log_credentials = "b.creds"
        log_ca = "b-ca.pem"
        log_cert = "b.pem"
        log_key = "b-key.pem"
        accept_log_risk = true
        process = "sync-0"
        advertise_grpc = "sync-0:1"
        advertise_http = "http://sync-0:2"
        lease_seconds = 9
        checkpoints = "s3://bucket/models"
        checkpoint_seconds = 60
        keep_checkpoints = 5
        keep_every_seconds = 900
        keep_last = 7
        keep_for_seconds = 3600
        history_seconds = 7200
        table_memory = "/scratch"
        release_memory_bytes = 2_000_000
        probe_seconds = 20
        probe_endpoint = "probe.toml"
        log_format = "text"
        log_level = "info"
        [limits]
        models = 6
        streams = 7
        [consumers]
        a = "m"
        [consumers.b]
        model = "m2"
        top_k = 3
        """
    (tmp_path / "c.toml").write_text(content)
    done = serve(env={"DELTASYNC_CONFIG": str(tmp_path / "c.toml")})
    assert done.exit_code == 0, done.output
    (options,) = served
    written = tomllib.loads(content)
    assert options.consumers == (ConsumerOptions("a", "m"), ConsumerOptions("b", "m2", Policy(top_k=3)))
    assert options.limits == LimitOptions(models=6, streams=7)
    assert options.log == ("nats://b1:4222", "nats://b2:4222")
    tables = {"consumers", "limits", "log", "log_monitor"}
    for name, value in written.items():
        assert name in tables or getattr(options, name) == type(getattr(options, name))(value), name
    assert options.norm_limit == NormLimit(50.0, quarantine=True)
    assert options.brokers == BrokerOptions(
        urls=("nats://b1:4222", "nats://b2:4222"), prefix="test", replicas=1, monitors=("http://b1:8222",),
        credentials=Path("b.creds"), ca=Path("b-ca.pem"), cert=Path("b.pem"), key=Path("b-key.pem"),
        max_bytes=8_000_000,
    )  # fmt: skip


def test_settings_that_are_tables_have_an_item_for_each_flag(served: list[ServiceOptions], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[limits]\nmodels = 6\nstreams = 7")
    arguments = ["--limit", "models=5", "--limit", "tables_per_model=4", "--config", str(tmp_path / "c.toml")]
    done = serve(*arguments)
    assert done.exit_code == 0, done.output
    assert served[0].limits == LimitOptions(models=5, streams=7, tables_per_model=4)


def test_when_a_checkpoint_is_written_follows_the_size_of_the_log(served: list[ServiceOptions]) -> None:
    serve("--log-max-bytes", "8000000")
    serve()
    serve("--checkpoint-bytes", "5")
    assert [options.most_log_bytes for options in served] == [2_000_000, 256 << 20, 5]


def test_several_consumers_come_from_flags_or_the_environment(served: list[ServiceOptions]) -> None:
    serve("--consumer", "a=m", "--consumer", "b=m")
    serve(env={"DELTASYNC_CONSUMER": "a=m b=m"})
    assert [options.consumers for options in served] == [
        (ConsumerOptions("a", "m"), ConsumerOptions("b", "m"))
    ] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "grcp_port = 1",
            "unknown setting 'grcp_port'; settings: accept_log_risk, admin_token, ",
        ),
        ("grpc-port = 1", "unknown setting 'grpc-port'"),
        ("grpc_port = ", "c.toml: Invalid value"),
        ('grpc_port = "many"', "Invalid value for '--grpc-port'"),
        ("grpc_port = 70000", "Invalid value for '--grpc-port'"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_what(
    served: list[ServiceOptions], tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "c.toml").write_text(content)
    done = serve("--config", str(tmp_path / "c.toml"))
    assert done.exit_code == 2
    assert said in done.output
    assert not served


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "/nowhere/c.toml"], "/nowhere/c.toml"),
        (["--consumer", "predictors"], "'predictors': expected NAME=MODEL"),
        (["--limit", "streams"], "'streams': expected NAME=NUMBER"),
        (["--limit", "streams=-1"], "limit streams: '-1', expected a whole number of at least 1"),
        (["--limit", "streams=" + "9" * 5000], "expected a whole number"),
        (["--consumer", "a=m", "--consumer", "a=n"], "'a=n': expected NAME=MODEL, and each NAME once"),
        (["--consumer", "a/b=m"], "consumer name 'a/b'"),
        (["--lease-seconds", "0.1"], "0.1 is not in the range 0.5<=x<=3600"),
        (["--keep-checkpoints", "1"], "1 is not in the range x>=2"),
        (["--replica-retention-seconds", "-1"], "-1.0 is not in the range x>=0"),
        (["--limit", "streams=0"], "limit streams: 0, expected a whole number of at least 1"),
        (["--limit", "colours=1"], "unknown limit 'colours'; limits: models"),
        (["--checkpoint-bytes", "0"], "--checkpoint-bytes"),
        (
            ["--checkpoint-bytes", "9000000", "--log-max-bytes", "8000000"],
            "checkpoint-bytes: 9000000, expected at most 2000000",
        ),
        (["--log-max-bytes", "1"], "--log-max-bytes"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        # `DeltasyncProbeFails` fires after a minute without a row: two probes have to be lost until then.
        *((["--probe-seconds", each], "is not in the range 0.1<=x<=30") for each in ("0.01", "31", "300")),
    ],
)
def test_a_wrong_flag_is_an_error_that_says_which(
    served: list[ServiceOptions], arguments: list[str], said: str
) -> None:
    done = serve(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert not served


def verbs(command: click.Command, *path: str) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    context = click.Context(command)
    found = [(path)]
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        if name == "demo":  # It is the trainer's and tested there.
            continue
        found += verbs(below, *path, name)
    return found


@pytest.mark.parametrize("path", verbs(cli), ids=" ".join)
def test_every_verb_explains_itself(path: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*path, "--help"])
    assert done.exit_code == 0
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    assert command.help
    shown = " ".join(done.output.split())
    assert command.help.splitlines()[0] in shown
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{path} {option.name}"
            assert option.opts[0] in done.output
            assert "_" not in option.opts[0]


def test_the_verbs_are_those_of_the_service() -> None:
    consumers = {f"consumers {verb}" for verb in ("list", "create", "update", "delete")}
    assert {"serve", "lag", "consumers", *consumers} <= {" ".join(path) for path in verbs(cli)}


def test_a_service_that_has_to_be_named_is_asked_for() -> None:
    """It was an AttributeError: click takes a default of None for a value."""

    @click.command()
    @service_options(default=None)
    def command(service: Endpoint) -> None:
        click.echo(service.address)

    assert "Missing option '--service'" in CliRunner().invoke(command, []).output
    assert CliRunner().invoke(command, ["--service", "localhost:1"]).output == "localhost:1\n"


@pytest.fixture
def ca(tmp_path: Path) -> str:
    CliRunner().invoke(cli, ["certs", str(tmp_path / "a pki")])
    return str(tmp_path / "a pki" / "ca.pem")


@pytest.mark.parametrize(
    ("options", "plain", "over_tls"),
    [
        (operator_options(), "http://127.0.0.1:8080", "https://127.0.0.1:8080"),
        (service_options(), "127.0.0.1:50051", "127.0.0.1:50051"),
    ],
)
def test_with_tls_the_default_address_is_of_tls(
    options: Callable[[Any], Any], plain: str, over_tls: str, ca: str, tmp_path: Path
) -> None:
    @click.command()
    @options
    def command(service: Endpoint) -> None:
        click.echo(f"{service.address} {service.tls}")

    (tmp_path / "endpoint.toml").write_text(f'ca = "{ca}"')
    assert CliRunner().invoke(command, []).output == f"{plain} False\n"
    for given in (["--ca", ca], ["--endpoint", str(tmp_path / "endpoint.toml")]):
        assert CliRunner().invoke(command, given).output == f"{over_tls} True\n"


def test_an_address_of_plain_text_that_is_given_stays_one(ca: str) -> None:
    done = CliRunner().invoke(cli, ["lag", "--ca", ca, "--service", "http://127.0.0.1:8080"])
    assert (done.exit_code, "ca needs TLS: use https://" in done.output) == (2, True)


def test_a_command_that_is_suggested_has_the_options_in_use(ca: str, tmp_path: Path) -> None:
    @click.command()
    @operator_options(changes=True)
    def command(service: Endpoint) -> None:
        click.echo(suggested("consumers resume c"))

    assert CliRunner().invoke(command, []).output == "deltasync consumers resume c\n"
    (tmp_path / "token").write_text("secret")
    given = ["--service", "https://db:8080", "--ca", ca, "--token-file", str(tmp_path / "token"), "--insecure"]
    said = CliRunner().invoke(command, [*given, "--by", "me"], env={"DELTASYNC_SERVER_NAME": "db"}).output
    assert shlex.split(said) == ["deltasync", "consumers", "resume", "c", *given]


def test_a_backup_by_the_service_needs_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["backup", "monday", "--service", "http://127.0.0.1:1"])
    assert (done.exit_code, f"on this machine it would be {tmp_path}/monday" in done.output) == (2, True)
    assert "absolute path of a folder on the service's machine" in " ".join(
        CliRunner().invoke(cli, ["backup", "--help"]).output.split()
    )
