"""What the service keeps, and where."""

from dataclasses import dataclass, field
from pathlib import Path

from deltasync.access.limits import LimitOptions
from deltasync.cuts.norm_guard import NormLimit

_CHECKPOINT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What the service keeps, and where.

    Attributes:
        data_dir: folder of everything the service keeps; made if missing.
        log_max_bytes: hard cap of the log's file.
        checkpoints: URL of a folder or of object storage that gets a copy of every checkpoint; None = none.
        checkpoint_seconds: a checkpoint of a model that has changed is written at least this often.
        checkpoint_bytes: a checkpoint is written once the log has this many bytes of newer rows of a model; None
            = 256 MiB, or a quarter of `log_max_bytes` if that is less.
        keep_checkpoints: number of checkpoints of a model to keep.
        keep_checkpoints_seconds: younger checkpoints are kept, too.
        table_memory: folder for scratch files that hold the tables; None = memory.
        release_memory_bytes: memory for the rows that replicas are being sent.
        replica_retention_seconds: a replica away for longer no longer holds its consumer's offset.
        norm_limit: what a row's norm may be at most; None = anything that is finite.
        limits: what peers may take.
    """

    data_dir: Path
    log_max_bytes: int = 64 << 30
    checkpoints: str | None = None
    checkpoint_seconds: float = 600.0
    checkpoint_bytes: int | None = None
    keep_checkpoints: int = 3
    keep_checkpoints_seconds: float = 0.0
    table_memory: Path | None = None
    release_memory_bytes: int = 64 << 20
    replica_retention_seconds: float = 3600.0
    norm_limit: NormLimit | None = None
    limits: LimitOptions = field(default_factory=LimitOptions)

    def __post_init__(self) -> None:
        most = self.log_max_bytes // 4
        if self.checkpoint_bytes is not None and not 1 <= self.checkpoint_bytes <= most:
            raise ValueError(
                f"checkpoint_bytes: {self.checkpoint_bytes}, expected 1 to {most}, a quarter of log_max_bytes: "
                "the log has to reach back over two checkpoints"
            )
        if self.keep_checkpoints < 2:
            raise ValueError(
                f"keep_checkpoints: {self.keep_checkpoints}, expected 2 or more: one of them may be damaged"
            )
        if self.replica_retention_seconds < 0:
            raise ValueError(f"replica_retention_seconds: {self.replica_retention_seconds}, expected 0 or more")

    @property
    def most_log_bytes(self) -> int:
        """Bytes of rows newer than the last checkpoint after which another one is written."""
        return self.checkpoint_bytes or min(_CHECKPOINT_BYTES, self.log_max_bytes // 4)
