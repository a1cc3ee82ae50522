"""Options of a service: its storage and its limits."""

from dataclasses import dataclass, field
from pathlib import Path

from deltasync.access.limits import LimitOptions
from deltasync.checkpoints.file_storage import DEADLINE_SECONDS
from deltasync.cuts.norm_guard import NormLimit
from deltasync.views.decision import RELEASE_OPTIONS, ReleaseOptions

_CHECKPOINT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """Options of a service: its storage and its limits.

    Attributes:
        data_dir: folder of all data of the service; created if missing.
        log_max_bytes: maximum size of the log file.
        checkpoints: URL of a folder or of object storage that gets a copy of every checkpoint; None = no copies.
        storage_seconds: longest time to wait for one answer of the folder or object storage that gets copies.
        checkpoint_seconds: longest time between checkpoints of a model that changes.
        checkpoint_bytes: write a checkpoint of a model once its newer rows take this many bytes of the log; None
            = 256 MiB, or a quarter of `log_max_bytes` if that is less.
        keep_checkpoints: number of checkpoints of a model to keep.
        keep_checkpoints_seconds: also keep checkpoints that are younger than this.
        keep_every_seconds: keep a version of each changed model this often; None = only on request.
        keep_last: number of the newest of these versions to keep.
        keep_for_seconds: also keep those that are younger than this.
        history_seconds: how long to store what consumers served.
        table_memory: folder for scratch files that contain the tables; None = memory.
        release_memory_bytes: memory for rows on their way to replicas.
        replica_retention_seconds: drop a replica from its consumer's offset after it has been away this long.
        norm_limit: limit of the growth of a row's norm; None = no limit.
        limits: limits of clients' requests.
        progress_seconds: how often a replica learns that there is nothing new; more often if its consumer has a
            readiness limit.
        silence_seconds: end a stream on which either side sends nothing for this long.
        releases: how releases of consumers with a policy are made.
    """

    data_dir: Path
    log_max_bytes: int = 64 << 30
    checkpoints: str | None = None
    storage_seconds: float = DEADLINE_SECONDS
    checkpoint_seconds: float = 600.0
    checkpoint_bytes: int | None = None
    keep_checkpoints: int = 3
    keep_checkpoints_seconds: float = 0.0
    keep_every_seconds: float | None = None
    keep_last: int = 10
    keep_for_seconds: float = 0.0
    history_seconds: float = 86_400.0
    table_memory: Path | None = None
    release_memory_bytes: int = 64 << 20
    replica_retention_seconds: float = 3600.0
    norm_limit: NormLimit | None = None
    limits: LimitOptions = field(default_factory=LimitOptions)
    progress_seconds: float = 5.0
    silence_seconds: float = 15.0
    releases: ReleaseOptions = RELEASE_OPTIONS

    def __post_init__(self) -> None:
        most = self.log_max_bytes // 4
        if self.checkpoint_bytes is not None and not 1 <= self.checkpoint_bytes <= most:
            raise ValueError(
                f"checkpoint_bytes: {self.checkpoint_bytes}, expected 1 to {most}, a quarter of log_max_bytes: "
                "the log must have room for the rows of two checkpoints"
            )
        if self.keep_checkpoints < 2:
            raise ValueError(
                f"keep_checkpoints: {self.keep_checkpoints}, expected 2 or more: one of them may be damaged"
            )
        if self.replica_retention_seconds < 0:
            raise ValueError(f"replica_retention_seconds: {self.replica_retention_seconds}, expected 0 or more")

    @property
    def most_log_bytes(self) -> int:
        """Bytes of newer rows after which the service writes another checkpoint."""
        return self.checkpoint_bytes or min(_CHECKPOINT_BYTES, self.log_max_bytes // 4)
