"""What operators ask of processes that share a log."""

from deltasync.core.errors import Contradiction, NotFound, NotOwner
from deltasync.core.words import listed
from deltasync.service.service import Service


async def drain_process(service: Service, name: str) -> list[str]:
    """Have this process give all its models to others, and take none any more: their names.

    Args:
        service: this process.
        name: that of the process; empty is this one.

    Raises:
        NotOwner: it is another one, which is to be asked.
        NotFound: there is none of that name.
        Contradiction: there is no other that could have them.
    """
    owners = service.owners
    others = {each.name: each for each in owners.processes() if each.name != owners.me.name}
    if name and name != owners.me.name:
        if name not in others:
            raise NotFound(f"no process {name!r}", detail=f"; processes: {listed([*others, owners.me.name])}")
        raise NotOwner(f"process {name!r} is to be asked itself", owner=others[name].owner())
    if all(each.draining for each in others.values()):
        raise Contradiction("there is no other process that could have the models: start one, or stop this one")
    models = sorted(service.models)
    await owners.drain()
    return models
