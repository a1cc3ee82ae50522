"""Ranks that publish everything."""

from typing import Any

import numpy as np
from tests.support.server import RunningService
from tests.support.wire import WHOLE, RankStream, full_part

from deltasync.core.position import Position
from deltasync.core.tables import Shard


def publish_everything(
    rank: RankStream, rows: list[np.ndarray], shards: list[Shard] = WHOLE, step: int = 1
) -> Position:
    """Have a rank whose stream begins publish all rows of its shards."""
    rank.opened()
    rank.send(*full_part(step, rows, shards))
    return rank.sealed()


def published(service: RunningService, rows: list[np.ndarray], **fields: Any) -> Position:
    """Have a rank publish everything that comes and goes."""
    with RankStream(service.grpc, **fields) as rank:
        return publish_everything(rank, rows, fields.get("shards", WHOLE))
