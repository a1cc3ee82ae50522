"""Who asks for a change over HTTP, which needs the admin token."""

from fastapi import Request

from deltasync.api.author import author
from deltasync.api.token import check_token


def author_of(token: str | None, request: Request) -> str:
    """Who sends a request.

    Raises:
        NotPermitted: it does not have the token, or the service has none.
        InvalidInput: the name that it gives is too long, or is not printable.
    """
    check_token(token, request.headers)
    client = request.client
    return author(request.headers, f"{client.host}:{client.port}" if client else "an unknown address")
