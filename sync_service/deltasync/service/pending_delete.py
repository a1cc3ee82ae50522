"""Deletes of rows that are asked for and not done."""

from dataclasses import dataclass

from deltasync.core.delete_request import DeleteRequest


@dataclass(frozen=True)
class PendingDelete:
    """A request to delete rows of a model, and what it waits for."""

    model: str
    request: DeleteRequest
    reason: str
