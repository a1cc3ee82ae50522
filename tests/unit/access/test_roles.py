"""What a roles file may say, and that tokens are compared as they should be."""

import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest

from deltasync.access.roles import (
    Grant,
    Identity,
    Role,
    Roles,
    TokenRoles,
    grants,
    read_roles,
    roles_of,
    token_digest,
)
from deltasync.base.addresses import is_loopback, may_listen
from deltasync.base.errors import InvalidInput
from deltasync.base.files import readable_by_all

DIGEST = hashlib.sha256(b"token").hexdigest()


def token(name: str = "a", **changes: Any) -> dict[str, Any]:
    """A file of one token, which is as it should be but for the changes; None: without that key."""
    described = {"sha256": DIGEST, "roles": ["read"]} | changes
    return {"tokens": {name: {key: value for key, value in described.items() if value is not None}}}


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"token": {}}, "unknown key 'token'; keys: certificates, tokens"),
        ({"tokens": []}, r"tokens: expected tables \[tokens.NAME\]"),
        (token(colour=1), r"\[tokens.a\]: unknown key 'colour'"),
        (token(sha256=DIGEST[1:]), "64 hexadecimal digits"),
        (token(sha256=DIGEST.upper()), "64 hexadecimal digits"),
        (token(sha256=None), "64 hexadecimal digits"),
        (token(roles=[]), "roles: expected a list of at least one"),
        (token(roles="read"), "roles: expected a list"),
        (token(roles=None), "roles: expected a list"),
        (token(roles=["rule"]), r"\[tokens.a\]: role 'rule': expected one of"),
        (token(roles=["read:x"]), "takes no pattern"),
        (token("a b"), "token name 'a b'"),
        (token(created=3), "created: expected a time"),
        (
            {"tokens": token("a")["tokens"] | token("b")["tokens"]},
            r"\[tokens.b\] has the same token as \[tokens.a\]",
        ),
        ({"certificates": {"": {"roles": ["read"]}}}, "1 to 256 printable"),
        ({"certificates": {"a": {"roles": ["read"], "sha256": DIGEST}}}, "unknown key 'sha256'"),
    ],
)
def test_what_cannot_be_is_said(described: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        roles_of(described)


@pytest.mark.parametrize("content", [b"[tokens", b"\xff", b"tokens = 1"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "roles.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=str(path)):
        read_roles(path)


def test_a_file_that_is_not_there_is_one_to_be_made(tmp_path: Path) -> None:
    said = r"roles\.toml: no such roles file; create one with `deltasync tokens`"
    with pytest.raises(InvalidInput, match=said):
        read_roles(tmp_path / "roles.toml")


def test_who_may_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "roles.toml"
    path.write_text("")
    path.chmod(0o644)
    assert readable_by_all(path)
    path.chmod(0o640)
    assert not readable_by_all(path)


def test_all_tokens_are_compared_each_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = Roles(tuple(TokenRoles(f"t{n}", token_digest(f"token-{n}"), ()) for n in range(5)))
    compared, real = [], hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr("deltasync.access.roles.hmac.compare_digest", compare)
    for wanted in ("token-0", "token-4", "another"):
        compared.clear()
        found = roles.of_token(token_digest(wanted))
        assert (found.name if found else None) == {"token-0": "t0", "token-4": "t4"}.get(wanted)
        assert compared == [(each.digest, token_digest(wanted)) for each in roles.tokens]


def test_the_first_name_of_a_certificate_that_is_known_counts() -> None:
    roles = Roles(certificates={"b": grants(["read"]), "c": grants(["admin"])})
    assert roles.of_certificate(("a", "b", "c")) == ("b", (Grant(Role.READ),))
    assert roles.of_certificate(("a",)) is None


@pytest.mark.parametrize(
    ("texts", "allowed", "refused"),
    [
        (["publish:clicks*"], [("publish", "clicks"), ("publish", "clicks-2"), ("publish", None)], [
            ("publish", "Clicks"), ("publish", "other"), ("subscribe", "clicks"), ("read", None)]),
        (["subscribe:m-?"], [("subscribe", "m-1")], [("subscribe", "m-12"), ("publish", "m-1")]),
        (["admin"], [("admin", None), ("read", None)], [("publish", "clicks"), ("subscribe", "c")]),
        (["read"], [("read", None)], [("admin", None), ("publish", None), ("subscribe", None)]),
        ([], [], [("read", None), ("admin", None), ("publish", None), ("subscribe", None)]),
    ],
)  # fmt: skip
def test_a_role_is_for_what_it_names(
    texts: list[str], allowed: list[tuple[str, str | None]], refused: list[tuple[str, str | None]]
) -> None:
    who = Identity("who", grants(texts))
    assert [each for each in allowed + refused if who.may(Role(each[0]), each[1]).yes] == allowed


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True), ("127.255.0.9", True), ("::1", True), ("localhost", True), ("::", False),
        ("0.0.0.0", False), ("10.0.0.1", False), ("localhost.example.org", False), ("", False),  # noqa: S104
        ("127.0.0.1.example.org", False), ("127.1", False),
    ],
)  # fmt: skip
def test_which_addresses_are_loopback(host: str, *, inside: bool) -> None:
    assert is_loopback(host) is inside


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("roles", [False, True])
@pytest.mark.parametrize("insecure", [False, True])
def test_what_others_reach_is_protected_or_said_to_be_insecure(*, tls: bool, roles: bool, insecure: bool) -> None:
    assert may_listen("127.0.0.1", tls=tls, roles=roles, insecure=insecure) == may_listen(
        "::1", tls=True, roles=True, insecure=False
    )
    outside = may_listen("0.0.0.0", tls=tls, roles=roles, insecure=insecure)  # noqa: S104
    assert outside.yes is (insecure or (tls and roles))
    assert bool(outside.reason) is not (tls and roles)
    assert ("without TLS" in outside.reason) is not tls
    assert ("without roles" in outside.reason.replace("TLS and ", "")) is not roles
    assert ("--insecure" in outside.reason) is not outside.yes


def test_a_file_that_disappears_after_it_was_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="gone: No such file"):
        readable_by_all(tmp_path / "gone")
