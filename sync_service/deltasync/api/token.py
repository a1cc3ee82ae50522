"""The admin token, which every call needs that changes something."""

import hmac
from collections.abc import Mapping

from deltasync.core.errors import NotPermitted


def check_token(token: str | None, sent: Mapping[str, str | bytes]) -> None:
    """Check the token in a call's metadata, or in its headers, against the service's token.

    Raises:
        NotPermitted: it is not that token, or the service has none.
    """
    if not token:
        raise NotPermitted("the service has no admin token: start it with --admin-token")
    authorization = str(sent.get("authorization", ""))
    if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise NotPermitted(
            "the admin token is missing or wrong: give it with --admin-token, or send 'authorization: "
            "Bearer TOKEN'"
        )
