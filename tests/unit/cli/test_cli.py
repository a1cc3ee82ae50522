import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deltasync.access.tls import TlsOptions
from deltasync.api.process import ServerOptions, SharedLogOptions
from deltasync.cli.endpoint_options import operator_options, service_options, suggested
from deltasync.cli.main import cli
from deltasync.client import Endpoint
from deltasync.cluster.member import ClusterOptions
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.cuts.norm_guard import NormLimit
from deltasync.log.brokers import BrokerOptions

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
    served: list[ServerOptions], tmp_path: Path, flag: int | None, env: int | None, file: int | None, port: int
) -> None:
    arguments = [] if flag is None else ["--grpc-port", str(flag)]
    if file is not None:
        (tmp_path / "c.toml").write_text(f"grpc_port = {file}")
        arguments += ["--config", str(tmp_path / "c.toml")]
    done = serve(*arguments, env={} if env is None else {"DELTASYNC_GRPC_PORT": str(env)})
    assert done.exit_code == 0, done.output
    assert served[0].grpc_port == port


def test_every_setting_may_be_in_the_file(served: list[ServerOptions], tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        """
        data_dir = "/data"
        host = "0.0.0.0"
        grpc_port = 1
        http_port = 2
        consumer = ["a=m", "b=m2"]
        admin_token = "t"
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
        release_memory = 2_000_000
        limit = ["models=5"]
        [limits]
        models = 6
        streams = 7
        """
    )
    done = serve(env={"DELTASYNC_CONFIG": str(tmp_path / "c.toml")})
    assert done.exit_code == 0, done.output
    (options,) = served
    assert (options.host, options.grpc_port, options.http_port) == ("0.0.0.0", 1, 2)  # noqa: S104
    assert (options.consumers, options.admin_token, options.drain_seconds) == (
        (ConsumerOptions("a", "m"), ConsumerOptions("b", "m2")),
        "t",
        6,
    )
    assert (options.roles, options.insecure) == (Path("roles.toml"), True)
    kept = options.service
    assert (kept.data_dir, kept.log_max_bytes, kept.checkpoint_bytes) == (Path("/data"), 8_000_000, 3)
    assert kept.norm_limit == NormLimit(50.0, quarantine=True)
    assert kept.replica_retention_seconds == 4.5
    assert options.tls == TlsOptions(cert=Path("c.pem"), key=Path("k.pem"), client_ca=Path("ca.pem"))
    assert (kept.limits.models, kept.limits.streams) == (5, 7)
    settings = {option.name for option in cli.get_command(click.Context(cli), "serve").params}  # type: ignore[union-attr]
    assert settings - {"config"} == {
        "data_dir", "host", "grpc_port", "http_port", "consumer", "admin_token_file", "log_max_bytes",
        "checkpoint_bytes", "replica_retention_seconds", "drain_seconds", "max_norm_growth", "poisoned", "roles",
        "insecure", "limit", "tls_cert", "tls_key", "tls_client_ca", "log", "log_replicas", "log_prefix",
        "log_monitor", "log_credentials", "log_ca", "log_cert", "log_key", "accept_log_risk", "process",
        "advertise_grpc", "advertise_http", "lease_seconds", "checkpoints", "checkpoint_seconds",
        "keep_checkpoints", "keep_every_seconds", "keep_last", "keep_for_seconds",
        "history_seconds",
        "table_memory", "release_memory", "log_format",
        "log_level", "probe_seconds", "probe_endpoint",
    }  # fmt: skip
    assert options.shared == SharedLogOptions(
        brokers=BrokerOptions(
            urls=("nats://b1:4222", "nats://b2:4222"), prefix="test", replicas=1, monitors=("http://b1:8222",),
            credentials=Path("b.creds"), ca=Path("b-ca.pem"), cert=Path("b.pem"), key=Path("b-key.pem"),
            max_bytes=8_000_000,
        ),
        process="sync-0", grpc="sync-0:1", http="http://sync-0:2",
        ownership=ClusterOptions(lease_seconds=9), accept_risk=True,
    )  # fmt: skip
    assert (kept.checkpoints, kept.checkpoint_seconds) == ("s3://bucket/models", 60)
    assert kept.keep_checkpoints == 5
    assert (kept.keep_every_seconds, kept.keep_last, kept.keep_for_seconds) == (900, 7, 3600)
    assert kept.history_seconds == 7200
    assert (kept.table_memory, kept.release_memory_bytes) == (Path("/scratch"), 2_000_000)


def test_when_a_checkpoint_is_written_follows_the_size_of_the_log(served: list[ServerOptions]) -> None:
    serve("--log-max-bytes", "8000000")
    serve()
    serve("--checkpoint-bytes", "5")
    assert [options.service.most_log_bytes for options in served] == [2_000_000, 256 << 20, 5]


def test_several_consumers_come_from_flags_or_the_environment(served: list[ServerOptions]) -> None:
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
    served: list[ServerOptions], tmp_path: Path, content: str, said: str
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
        (["--limit", "streams=-1"], "limit streams: -1, expected a whole number of at least 1"),
        (["--limit", "streams=" + "9" * 5000], "expected NAME=NUMBER"),
        (["--limit", "streams=0"], "limit streams: 0, expected a whole number of at least 1"),
        (["--limit", "colours=1"], "unknown limit 'colours'; limits: models"),
        (["--checkpoint-bytes", "0"], "--checkpoint-bytes"),
        (
            ["--checkpoint-bytes", "9000000", "--log-max-bytes", "8000000"],
            "checkpoint_bytes: 9000000, expected 1 to 2000000",
        ),
        (["--log-max-bytes", "1"], "--log-max-bytes"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        # `DeltasyncProbeFails` fires after a minute without a row: two probes have to be lost until then.
        *((["--probe-seconds", each], "is not in the range 0.1<=x<=30") for each in ("0.01", "31", "300")),
    ],
)
def test_a_wrong_flag_is_an_error_that_says_which(
    served: list[ServerOptions], arguments: list[str], said: str
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


def test_a_backup_by_the_service_needs_an_absolute_path_and_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["backup", "monday", "--service", "http://127.0.0.1:1"])
    assert (done.exit_code, f"on this machine it would be {tmp_path}/monday" in done.output) == (2, True)
    assert "absolute path of a folder on the service's machine" in " ".join(
        CliRunner().invoke(cli, ["backup", "--help"]).output.split()
    )
