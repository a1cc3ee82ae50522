"""All attacks by name."""

from tests.attacks import connections, disk, errors, floods, frames, memory, queues, takeover

_FAMILIES = (takeover, memory, disk, queues, errors, connections, frames, floods)
ATTACKS = {each.name: each for module in _FAMILIES for each in module.FAMILY.attacks}
