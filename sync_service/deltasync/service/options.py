"""What the service keeps, and where."""

from dataclasses import dataclass, field
from pathlib import Path

from deltasync.core.limits import LimitOptions
from deltasync.publish.norm_guard import NormLimit

# Unless `flush_bytes` says more, or less.
_FLUSH_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What the service keeps, and where.

    Attributes:
        data_dir: folder of everything the service keeps; made if missing.
        log_max_bytes: hard cap of the log's file.
        flush_bytes: tables are flushed, and the log is cut, once it holds this many bytes of newer rows; None is
            1 GiB, or half of `log_max_bytes` if that is less.
        replica_retention_seconds: a replica away for longer no longer holds its consumer's offset.
        norm_limit: what a row's norm may be at most; None = anything that is finite.
        limits: what peers may take.
    """

    data_dir: Path
    log_max_bytes: int = 64 << 30
    flush_bytes: int | None = None
    replica_retention_seconds: float = 3600.0
    norm_limit: NormLimit | None = None
    limits: LimitOptions = field(default_factory=LimitOptions)

    def __post_init__(self) -> None:
        half = self.log_max_bytes // 2
        if self.flush_bytes is not None and not 1 <= self.flush_bytes <= half:
            raise ValueError(f"flush_bytes: {self.flush_bytes}, expected 1 to {half}, half of log_max_bytes")
        if self.replica_retention_seconds < 0:
            raise ValueError(f"replica_retention_seconds: {self.replica_retention_seconds}, expected 0 or more")

    @property
    def most_unflushed_bytes(self) -> int:
        """How many bytes of rows that the tables' files do not have the log is to hold."""
        return self.flush_bytes or min(_FLUSH_BYTES, self.log_max_bytes // 2)
