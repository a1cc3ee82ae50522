"""The number of the protocol, which a client names with every call, and the refusal of another one."""

import re
from collections.abc import Mapping

from deltasync.core.errors import Contradiction, InvalidInput

PROTOCOL = 1

_KEY = "deltasync-protocol"
_UNNAMED = "1"  # The protocol of a call that names none, as one made by hand.
_FORM = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
_SHOWN = 40


def protocol_to_metadata(protocol: int = PROTOCOL) -> tuple[str, str]:
    """The entry of a call's metadata that names the client's protocol."""
    return _KEY, str(protocol)


def check_protocol(metadata: Mapping[str, str | bytes]) -> None:
    """Check that the client of a call speaks the service's protocol.

    Raises:
        InvalidInput: what the metadata name is no number.
        Contradiction: the client speaks another one.
    """
    text = str(metadata.get(_KEY, _UNNAMED))
    if not _FORM.fullmatch(text):
        raise InvalidInput(f"{_KEY}: {text[:_SHOWN]!r}, expected a number such as {PROTOCOL}")
    if (protocol := int(text)) != PROTOCOL:
        side = "service" if protocol > PROTOCOL else "client"
        raise Contradiction(
            f"the client speaks protocol {protocol}, the service protocol {PROTOCOL}: update the {side}"
        )
