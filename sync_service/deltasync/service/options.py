"""The settings of `deltasync serve`."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltasync.access.limits import LimitOptions
from deltasync.base.addresses import listening_host
from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput
from deltasync.base.logs import LEVELS, LogFormat
from deltasync.base.settings import setting
from deltasync.checkpoints.file_storage import DEADLINE_SECONDS
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.cuts.norm_guard import NormLimit
from deltasync.log.brokers import BrokerOptions
from deltasync.model.model_store import KEPT_SEALS
from deltasync.model.releases import BLOCK_BYTES
from deltasync.views.decision import RELEASE_OPTIONS, ReleaseOptions

_CHECKPOINT_BYTES = 256 << 20


def _consumers(table: object, flags: Mapping[str, str]) -> tuple[ConsumerOptions, ...]:
    """The consumers of the table [consumers] and of flags. One with only a model keeps the policy it may have."""
    if not isinstance(table, Mapping):
        raise InvalidInput("consumers: expected tables [consumers.NAME]")
    in_file = [_consumer(name, each) for name, each in table.items()]
    for each in in_file:
        if (model := flags.get(each.name, each.model)) != each.model:
            raise InvalidInput(
                f"consumer {each.name!r}: model {model!r} in --consumer, but {each.model!r} in "
                f"[consumers.{each.name}] of the --config file; name the same model in both"
            )
    return (*(_consumer(name, model) for name, model in flags.items() if name not in table), *in_file)


def _consumer(name: str, described: object) -> ConsumerOptions:
    try:
        if isinstance(described, str):
            return ConsumerOptions(check_name("consumer", name), check_name("model", described))
        if not isinstance(described, Mapping):
            raise InvalidInput("expected a table or the name of a model")
        policy = {key: value for key, value in described.items() if key != "model"}
        return ConsumerOptions.described(name, described.get("model"), policy)
    except InvalidInput as error:
        raise InvalidInput(f"[consumers.{name}]: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """The settings of a service.

    Each is declared once, here. Flags, variables, keys of the `--config` file, `deltasync serve --help` and
    sync_service/docs/reference/settings.md are derived from the declaration.

    Attributes:
        storage_seconds: longest time to wait for one answer of the storage for copies of checkpoints.
        look_seconds: pause between two looks at what is due: checkpoints, versions to keep, changed files.
        progress_seconds: how often a replica learns that there is nothing new; more often if its consumer has a
            readiness limit.
        silence_seconds: end a stream on which either side sends nothing for this long.
        quiet_seconds: end the stream of a replica that receives nothing of a release for this long, because the
            release occupies memory. A replica with a slow target reconnects.
        watch_seconds: pause between two looks at whether a replica has stalled.
        ack_pace_seconds: pause before the next ack of a replica that sends more than it needs.
        housekeeping_seconds: pause between two rounds of housekeeping.
        metrics_seconds: requests for metrics within this time share them.
        early_seconds: most models recover within this time. A service that listens only afterwards need not refuse
            their streams.
        checkpoint_retry_seconds: pause after the first failure of a checkpoint; it doubles up to
            `checkpoint_seconds`. It also separates checkpoints while the log is full.
        checkpoint_versions: write a checkpoint after this many versions: a seal that was dropped cannot be applied
            again.
        kept_retry_seconds: pause before the next attempt to list the kept versions of a model.
        deletion_seconds: longest wait of a deletion for a cut that is being applied.
        release_block_bytes: copy this much of a large release at a time.
        releases: how releases of consumers with a policy are made.
    """

    data_dir: Path = setting(
        Path("deltasync-data"), "Folder for all of the service's data; created if missing.", metavar="DIR"
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    grpc_port: int = setting(
        50051,
        "gRPC port for trainers and replicas; 0 = any free port, written to endpoints.json in --data-dir.",
        least=0,
        most=65535,
    )
    http_port: int = setting(8080, "HTTP port for operators; 0 = any free port.", least=0, most=65535)
    tls_cert: Path | None = setting(
        None,
        "PEM file of the service's certificate. Both ports then use TLS. The service reloads the three files when "
        "they change.",
    )
    tls_key: Path | None = setting(None, "PEM file of the certificate's key.")
    tls_client_ca: Path | None = setting(
        None, "PEM file of the CAs of clients. gRPC then requires a client certificate, HTTP accepts one."
    )
    consumers: tuple[ConsumerOptions, ...] = setting(
        (),
        "Create this consumer at the start if it is missing. May be repeated.",
        flag="--consumer",
        metavar="NAME=MODEL",
        read=_consumers,
        reload=True,
    )
    roles: Path | None = setting(
        None,
        "File with the roles of tokens and certificates, see `deltasync tokens`; reloaded when it changes. "
        "Without it anyone may publish, subscribe and read.",
    )
    admin_token: str | None = setting(None, "Token that gets role admin.", secret=True)
    admin_token_file: Path | None = setting(
        None,
        "File with a token that gets role admin. Or set DELTASYNC_ADMIN_TOKEN, or the key admin_token.",
    )
    insecure: bool = setting(
        False, "Listen on an address that other machines can reach, even without TLS and roles."
    )
    log: tuple[str, ...] = setting(
        (),
        "NATS brokers that keep the log, nats://HOST:PORT. Several processes then share the models.",
        metavar="URL[,URL]",
        shown="a file in --data-dir",
    )
    log_credentials: Path | None = setting(None, "File with credentials for the brokers.")
    log_ca: Path | None = setting(None, "PEM file of the brokers' CA.")
    log_cert: Path | None = setting(None, "PEM file of the certificate to show the brokers.")
    log_key: Path | None = setting(None, "PEM file of that certificate's key.")
    log_monitor: tuple[str, ...] = setting(
        (),
        "Monitoring ports of the brokers, http://HOST:PORT. Used to check that they sync to disk.",
        metavar="URL[,URL]",
    )
    log_prefix: str = setting("deltasync", "Prefix of all names in the brokers.")
    log_replicas: int = setting(3, "Copies of each log.", least=1)
    accept_log_risk: bool = setting(False, "Serve even if the brokers could lose acknowledged data.")
    process: str = setting("", "Name of this process among those that share the log.", shown="the host's name")
    advertise_grpc: str = setting(
        "", "gRPC address at which clients and other processes reach this one.", metavar="HOST:PORT"
    )
    advertise_http: str = setting(
        "", "HTTP address at which clients and other processes reach this one.", metavar="URL"
    )
    lease_seconds: float = setting(
        6.0, "Take over the models of a process that has been silent for this long.", least=0.5, most=3600
    )
    log_max_bytes: int = setting(64 << 30, "Maximum size of the log file, which grows as needed.", least=1 << 20)
    checkpoints: str | None = setting(
        None,
        "Also copy every checkpoint to this folder or object storage, s3://BUCKET/PATH.",
        metavar="URL",
        shown="only in --data-dir",
    )
    checkpoint_seconds: float = setting(
        600.0, "Write a checkpoint of each changed model at least once in this many seconds.", least=1
    )
    checkpoint_bytes: int | None = setting(
        None,
        "Write a checkpoint of a model once the log has this many bytes of newer rows.",
        least=1,
        shown="256 MiB, at most a quarter of --log-max-bytes",
    )
    keep_checkpoints: int = setting(
        3,
        "Checkpoints to keep for each model, as one may be damaged. The log reaches back to the second newest.",
        least=2,
    )
    keep_every_seconds: float | None = setting(
        None,
        "Keep a version of each changed model this often.",
        least=1,
        shown="only `deltasync versions keep`",
    )
    keep_last: int = setting(
        10,
        "Number of the newest versions kept by --keep-every-seconds that stay. Versions with a name always stay.",
        least=1,
    )
    keep_for_seconds: float = setting(
        0.0, "Versions kept by --keep-every-seconds that are younger than this also stay.", least=0
    )
    history_seconds: float = setting(
        86_400.0,
        "How long to store what consumers served. A consumer can follow another one at most this far behind.",
        least=120,
    )
    table_memory: Path | None = setting(
        None,
        "Keep tables in scratch files in this folder, on a fast disk. For tables larger than memory.",
        metavar="DIR",
        shown="memory",
    )
    release_memory_bytes: int = setting(
        64 << 20,
        "Memory for rows on their way to replicas. Larger releases are copied block by block.",
        least=1 << 20,
    )
    replica_retention_seconds: float = setting(
        3600.0, "Stop counting a replica in its consumer's offset once it has been away this long.", least=0
    )
    drain_seconds: float = setting(5.0, "On SIGTERM, wait this long for open cuts to finish.", least=0)
    max_norm_growth: float | None = setting(
        None,
        "Refuse a cut with a row whose norm exceeds the table's largest so far by this factor. See --poisoned. No "
        "limit by default.",
        least=1,
    )
    poisoned: Literal["refuse", "quarantine"] = setting(
        "refuse",
        "What to do with a cut over --max-norm-growth: refuse it, or pause the model's consumers and seal it.",
    )
    probe_seconds: float | None = setting(
        None,
        "Seconds between probes: publish a row to the probe's own model and read it back.",
        least=0.1,
        most=30,  # Half the delay of the alert DeltasyncProbeFails, which would fire for a slower probe.
    )
    probe_endpoint: Path | None = setting(
        None, "TOML file with the probe's credentials, as for --endpoint. Required with TLS or roles."
    )
    log_format: LogFormat = setting(
        "auto", "Format of the log on standard error. auto is text on a terminal and JSON elsewhere."
    )
    log_level: str = setting(
        "info",
        f"Lowest level to log: {', '.join(LEVELS)}. Add ,deltasync.NAME=LEVEL for single loggers.",
    )
    limits: LimitOptions = setting(
        LimitOptions(),
        "Limit on what a peer may use, see sync_service/docs/reference/settings.md. May be repeated.",
        flag="--limit",
        metavar="NAME=NUMBER",
        read=LimitOptions.read,
        reload=True,
    )
    storage_seconds: float = DEADLINE_SECONDS
    look_seconds: float = 1.0
    progress_seconds: float = 5.0
    silence_seconds: float = 15.0
    quiet_seconds: float = 120.0
    watch_seconds: float = 5.0
    ack_pace_seconds: float = 0.05
    housekeeping_seconds: float = 1.0
    metrics_seconds: float = 0.1
    early_seconds: float = 1.0
    checkpoint_retry_seconds: float = 5.0
    checkpoint_versions: int = KEPT_SEALS // 2
    kept_retry_seconds: float = 10.0
    deletion_seconds: float = 10.0
    release_block_bytes: int = BLOCK_BYTES
    releases: ReleaseOptions = RELEASE_OPTIONS

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", listening_host(self.host))
        most = self.log_max_bytes // 4
        if (self.checkpoint_bytes or 0) > most:
            raise InvalidInput(
                f"--checkpoint-bytes: {self.checkpoint_bytes}, expected at most {most}, a quarter of "
                "--log-max-bytes: the log must have room for the rows of two checkpoints"
            )
        tls = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        if (any(tls.values()) or self.tls_client_ca) and not all(tls.values()):
            missing = " and ".join(name for name, path in tls.items() if not path)
            raise InvalidInput(f"TLS needs a certificate and its key: also give {missing}")
        if self.probe_seconds and (self.tls_cert or self.roles) and not self.probe_endpoint:
            raise InvalidInput(
                "--probe-seconds: with TLS or roles the probe needs credentials; give --probe-endpoint"
            )
        if self.brokers is None:
            return
        object.__setattr__(self, "process", self.process or socket.gethostname().partition(".")[0])
        check_name("process", self.process)
        if self.advertise_http and not self.advertise_http.startswith(("http://", "https://")):
            raise InvalidInput(f"--advertise-http: {self.advertise_http!r}: expected a URL, http://HOST:PORT")
        if not self.checkpoints:
            raise InvalidInput("--log: also give --checkpoints, from which others load a model to take it over")

    @property
    def brokers(self) -> BrokerOptions | None:
        """The brokers of a shared log; None = the log is a file in `data_dir`."""
        if not self.log:
            return None
        return BrokerOptions(
            urls=self.log,
            prefix=self.log_prefix,
            replicas=self.log_replicas,
            credentials=self.log_credentials,
            ca=self.log_ca,
            cert=self.log_cert,
            key=self.log_key,
            monitors=self.log_monitor,
            max_bytes=self.log_max_bytes,
        )

    @property
    def most_log_bytes(self) -> int:
        """Bytes of newer rows after which the service writes another checkpoint."""
        return self.checkpoint_bytes or min(_CHECKPOINT_BYTES, self.log_max_bytes // 4)

    @property
    def norm_limit(self) -> NormLimit | None:
        """The limit of the growth of a row's norm."""
        return NormLimit(self.max_norm_growth, self.poisoned == "quarantine") if self.max_norm_growth else None
