"""Messages that say how rows that a replica holds compare."""

import numpy as np

from deltasync.core.tables import ID_TYPE
from deltasync.core.verified import VerifiedStatus, VerifiedTable
from deltasync.v1 import admin_pb2


def verified_to_message(table: VerifiedTable) -> admin_pb2.VerifiedTable:
    """The message."""
    return admin_pb2.VerifiedTable(
        table=table.table,
        rows=table.rows,
        status=table.status.number,
        checksum=table.checksum,
        held=table.held,
        ids=table.ids.tolist(),
        differing=table.differing,
    )


def verified_from_message(message: admin_pb2.VerifiedTable) -> VerifiedTable:
    """What the message says; a status that a later service has is one that cannot be shown here."""
    return VerifiedTable(
        message.table,
        message.rows,
        VerifiedStatus.of_number(message.status) or VerifiedStatus.NOT_SHOWN,
        message.checksum,
        message.held,
        np.array(message.ids, ID_TYPE),
        message.differing,
    )
