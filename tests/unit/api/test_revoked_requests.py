"""A request whose caller loses the role that it needs: it ends, and its answer says so."""

import asyncio
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from deltasync.api.access import Access
from deltasync.api.access_routes import AccessMiddleware
from deltasync.api.audit import Audit
from deltasync.core.access import Grant, Role
from deltasync.core.events import Events
from deltasync.core.roles import Roles, TokenRoles, token_digest

ROLES = Roles((TokenRoles("ana", token_digest("ana's"), (Grant(Role.ADMIN),)),))
SCOPE: Scope = {
    "type": "http",
    "method": "POST",
    "path": "/inspect",
    "headers": [(b"authorization", b"Bearer ana's")],
    "client": ("127.0.0.1", 4711),
}


@pytest.mark.parametrize("answering", [False, True])
def test_it_is_refused_unless_its_answer_has_begun(answering: bool) -> None:
    sent, asked = list[dict[str, Any]](), asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        if answering:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        asked.set()
        await asyncio.Event().wait()

    async def keep(message: Any) -> None:
        sent.append(message)

    async def nothing() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        access = Access(None, ROLES, Audit(Events()))
        request = asyncio.create_task(AccessMiddleware(app, access)(SCOPE, nothing, keep))
        await asked.wait()
        access.take(Roles())
        if answering:
            with pytest.raises(asyncio.CancelledError):
                await request
        else:
            await request

    asyncio.run(main())
    assert [each["status"] for each in sent if "status" in each] == [200 if answering else 403]
