"""A process among others: it owns models on logs that others can go on with."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from deltasync.api.endpoints_file import Addresses
from deltasync.api.server_options import SharedLogOptions
from deltasync.base.errors import InvalidInput
from deltasync.cluster.member import Member
from deltasync.cluster.ownership import Ownership
from deltasync.log.brokers import connect
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.service.hosting import Hosting
from deltasync.service.service import Service

logger = logging.getLogger(__name__)


async def open_logs(options: SharedLogOptions, data_dir: Path) -> JetStreamLogs:
    """The logs, once it is known whether brokers could lose what they have acknowledged.

    Raises:
        InvalidInput: they could, and that is not accepted; or the data directory has a log of its own, whose
            checkpoints would be removed as those of models that others own.
        StorageFailed: no broker can be used.
    """
    if (own := data_dir / "log" / "data.mdb").exists():
        raise InvalidInput(
            f"{data_dir} is the data directory of a service with a log of its own, {own}: a process whose log is "
            "among brokers removes checkpoints there of models that it does not own: give it another --data-dir"
        )
    logs = await asyncio.to_thread(JetStreamLogs, options.brokers, options.process)
    try:
        logs.accepted_risks = await asyncio.to_thread(logs.risks)
        if logs.accepted_risks and not options.accept_risk:
            raise InvalidInput(f"{'; '.join(logs.accepted_risks)}: mend it, or accept it with --accept-log-risk")
    except BaseException:
        await asyncio.to_thread(logs.close)
        raise
    for risk in logs.accepted_risks:
        logger.warning("accepted: %s", risk)
    return logs


@contextlib.asynccontextmanager
async def member(
    service: Service, options: SharedLogOptions, logs: JetStreamLogs, where: Addresses
) -> AsyncIterator[None]:
    """While the block runs, the process owns models with the others; at its end they have all of them.

    Raises:
        StorageFailed, ServiceUnavailable: brokers cannot be used.
    """
    from deltasync.cluster.nats_bucket import BucketOptions, NatsBucket

    client = await connect(options.brokers, options.process)
    bucket = NatsBucket(
        client, BucketOptions(name=f"{options.brokers.prefix}_owners", replicas=options.brokers.replicas)
    )
    hosting = service.hosting = Hosting(service, logs)
    me = Member(
        options.process,
        options.grpc or where.grpc,
        options.http or where.http,
        run=uuid.uuid4().hex,
        started=time.time_ns(),
    )
    service.owners = owners = Ownership(options.ownership, me, bucket, hosting, service.events)
    try:
        await owners.start()
        looking = asyncio.create_task(hosting.look_after())
        try:
            yield
        finally:
            looking.cancel()
            await owners.close()
    finally:
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # Of brokers that have gone before.
            await client.close()
