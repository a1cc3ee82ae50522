"""Every error deltasync raises on purpose.

    DeltasyncError
    ├── InvalidInput        an input that can never be right; nothing was changed
    ├── NotFound            a name that does not exist; the message lists those that do
    ├── Contradiction       right in itself, but not with what the service holds
    ├── Superseded          a newer stream, run or cut has taken this one's place
    ├── NotPermitted        the admin token is missing or wrong
    ├── Damaged             rows are not those of which their digests were made; nothing was changed
    ├── StorageFailed       files or the log could not be written, or not be read back whole
    ├── ServiceFailed       (client) the service met an error of its own; its log says more
    ├── ServiceUnavailable  the service cannot be reached, or is draining; try again
    └── ResyncRequired      the service does not hold what this run builds on: publish every row

`deltasync.wire.error_codes` maps them to gRPC codes and HTTP statuses, and back.
"""


class DeltasyncError(Exception):
    """Base of all errors raised on purpose."""


class InvalidInput(DeltasyncError, ValueError):
    """An input that can never be right; nothing was changed."""


class NotFound(DeltasyncError, LookupError):
    """A name that does not exist; the message lists those that do."""


class Contradiction(DeltasyncError):
    """Right in itself, but at odds with what the service holds."""


class Superseded(DeltasyncError):
    """A newer stream, run or cut has taken this one's place."""


class NotPermitted(DeltasyncError):
    """The admin token is missing or wrong."""


class Damaged(DeltasyncError):
    """Rows are not those of which their digests were made; nothing was changed."""


class StorageFailed(DeltasyncError):
    """Files or the log could not be written, or not be read back whole."""


class ServiceFailed(DeltasyncError):
    """The service met an error of its own; its log says more."""


class ServiceUnavailable(DeltasyncError):
    """The service cannot be reached, or is draining."""


class ResyncRequired(DeltasyncError):
    """The service does not hold what this run builds on: publish every row."""
