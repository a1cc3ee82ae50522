import asyncio
import subprocess
import sys

import pytest

from deltasync.core.errors import NotFound
from deltasync.ownership.alone import Alone
from deltasync.ownership.member import Member
from deltasync.ownership.owners import Owners

ME = Member("a", "a:1", "http://a")


def test_whoever_is_alone_owns_everything_and_can_give_nothing_away() -> None:
    async def scenario(owners: Owners) -> None:
        await owners.start()
        owners.check("ads")
        assert owners.confirmed
        assert await owners.claim("ads") == owners.owner_of("ads") == ME.owner()
        assert list(owners.processes()) == [ME]
        assert not owners.gone()
        await owners.reserve_consumer("fleet", "ads")
        with pytest.raises(NotFound, match="no other process 'b'"):
            await owners.move("ads", "b")
        await owners.drain()
        owners.check("ads")
        await owners.close()

    asyncio.run(scenario(Alone(ME)))


def test_it_needs_no_client_of_brokers() -> None:
    code = "import sys, deltasync.ownership.alone, deltasync.ownership.ownership; sys.exit('nats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
