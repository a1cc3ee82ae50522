"""The roles of a file, as it is now: taken over when it changes, while the service runs."""

import asyncio
import logging
from pathlib import Path

from deltasync.api.access import Access
from deltasync.core.errors import DeltasyncError
from deltasync.core.events import EventKind, Events
from deltasync.core.exposure import readable_by_all
from deltasync.core.file_watch import FileWatch
from deltasync.core.roles import Roles, read_roles
from deltasync.core.words import counted

logger = logging.getLogger(__name__)


class RolesFile:
    """A file of roles, read when this is made, and then whenever it has changed. Used in the event loop.

    Attributes:
        roles: what it said when it was last right.

    Raises:
        InvalidInput: it cannot be read, or says what cannot be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = FileWatch([path])
        self.roles = _read(path)

    async def follow(self, access: Access, events: Events) -> None:
        """Have an access take over what has changed, until cancelled."""
        while True:
            await self._watch.changed()
            await self.reload(access, events)

    async def reload(self, access: Access, events: Events) -> None:
        """Have an access take over what the file says now. One that became bad changes nothing."""
        try:
            roles = await asyncio.to_thread(_read, self._path)
        except DeltasyncError as error:
            access.trouble = f"the roles are those of before: {error}"
            events.emit(EventKind.ROLES_REFUSED, "those of before hold", error)
            return
        access.trouble = ""
        if roles != self.roles:
            self.roles = roles
            access.take(roles)
            number = counted(len(roles.tokens), "token"), counted(len(roles.certificates), "certificate")
            events.emit(EventKind.ROLES_RELOADED, f"{' and '.join(number)} have roles")


def _read(path: Path) -> Roles:
    """What it says; blocks. Where all users of the machine may read it, the log says so."""
    roles = read_roles(path)
    if readable_by_all(path):
        logger.warning("%s can be read by every user of this machine: take that right from them", path)
    return roles
