"""The admin token, which every call needs that changes something."""

import hmac

from deltasync.core.errors import NotPermitted


def check_token(token: str | None, authorization: str) -> None:
    """Check what a call sent as `authorization` against the service's token.

    Raises:
        NotPermitted: it is not that token, or the service has none.
    """
    if not token:
        raise NotPermitted("the service has no admin token: start it with --admin-token")
    if not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
        raise NotPermitted(
            "the admin token is missing or wrong: give it with --admin-token, or send 'authorization: "
            "Bearer TOKEN'"
        )
