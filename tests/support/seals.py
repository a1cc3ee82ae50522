"""Seals with defaults, so that a test only states what matters."""

from deltasync.core.seal import Seal


def sealed(
    version: int,
    *,
    run: str = "r",
    world_size: int = 9,
    sealed_unix_ns: int = 1,
    event_time_unix_ns: int | None = None,
    rollback_of: int | None = None,
    accepts_any: bool = False,
) -> Seal:
    return Seal(
        version=version,
        step=version,
        run=run,
        run_started_unix_ns=1,
        world_size=world_size,
        rows=1,
        bytes=1,
        log_bytes=1,
        step_end_unix_ns=1,
        sealed_unix_ns=sealed_unix_ns,
        event_time_unix_ns=event_time_unix_ns,
        rollback_of=rollback_of,
        accepts_any=accepts_any,
    )
