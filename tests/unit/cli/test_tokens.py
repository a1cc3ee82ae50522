"""`deltasync tokens`: the file that it changes, and what it prints."""

import hashlib
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from deltasync.access.roles import Grant, Role, read_roles, token_digest
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.cli.tokens import tokens

WRITTEN = """# Who may do what. Ask anna before you change it.
[tokens.old] # of the first trainer
sha256 = "{digest}"
roles = ["read"] # nothing else

[certificates."a.example.org"]
roles = ["admin"]
"""


@pytest.fixture
def roles(tmp_path: Path) -> Path:
    return tmp_path / "roles.toml"


def run(*arguments: object) -> str:
    """What it prints on stdout; raises what it fails with."""
    done = CliRunner().invoke(tokens, [str(each) for each in arguments])
    if isinstance(done.exception, DeltasyncError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_token_is_printed_once_and_only_its_digest_is_kept(roles: Path) -> None:
    printed = run("create", "trainer", "--role", "publish:clicks*", "--role", "read", "--roles", roles)
    token = printed.removesuffix("\n")
    assert len(token) == 43  # 32 random bytes.
    assert token not in roles.read_text()
    (found,) = read_roles(roles).tokens
    assert (found.name, found.digest) == ("trainer", hashlib.sha256(token.encode()).digest())
    assert found.grants == (Grant(Role.PUBLISH, "clicks*"), Grant(Role.READ))
    assert read_roles(roles).of_token(token_digest(token)) == found
    assert stat.S_IMODE(roles.stat().st_mode) == 0o600


def test_no_two_tokens_are_alike(roles: Path) -> None:
    made = {run("create", f"t{number}", "--role", "read", "--roles", roles) for number in range(20)}
    assert len(made) == 20


def test_what_people_have_written_stays(roles: Path) -> None:
    digest = "0" * 64
    roles.write_text(WRITTEN.format(digest=digest))
    roles.chmod(0o640)
    run("create", "new", "--role", "subscribe:mobile-*", "--roles", roles)
    run("allow", "b.example.org", "--role", "read", "--roles", roles)
    lines = roles.read_text().splitlines()
    assert [line for line in WRITTEN.format(digest=digest).splitlines() if line and line not in lines] == []
    assert stat.S_IMODE(roles.stat().st_mode) == 0o640
    assert [line.split() for line in run("list", "--roles", roles).splitlines()] == [
        ["kind", "name", "roles"],
        ["token", "old", "read"],
        ["token", "new", "subscribe:mobile-*"],
        ["certificate", "a.example.org", "admin"],
        ["certificate", "b.example.org", "read"],
    ]
    assert run("revoke", "new", "--roles", roles) == "token new revoked\n"
    assert run("revoke", "b.example.org", "--roles", roles) == "certificate b.example.org revoked\n"
    assert read_roles(roles).certificates.keys() == {"a.example.org"}
    assert [each.name for each in read_roles(roles).tokens] == ["old"]


def test_a_file_behind_a_link_is_changed_where_it_is(roles: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(roles)
    run("create", "trainer", "--role", "publish", "--roles", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert len(read_roles(roles).tokens) == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (("create", "old", "--role", "read"), Contradiction, "token 'old' exists"),
        (("create", "new", "--role", "write"), InvalidInput, "role 'write': expected one of publish"),
        (("create", "a b", "--role", "read"), InvalidInput, "token name 'a b'"),
        (("allow", "x\n", "--role", "read"), InvalidInput, "printable"),
        (("revoke", "nobody"), NotFound, "no token and no certificate 'nobody'; existing names: a.example.org"),
    ],
)
def test_a_wrong_wish_changes_nothing(
    roles: Path, arguments: tuple[str, ...], kind: type[DeltasyncError], said: str
) -> None:
    before = WRITTEN.format(digest="0" * 64)
    roles.write_text(before)
    with pytest.raises(kind) as refused:
        run(*arguments, "--roles", roles)
    assert said in str(refused.value)
    assert roles.read_text() == before
    assert list(roles.parent.iterdir()) == [roles]


def test_a_file_that_is_wrong_already_is_not_changed(roles: Path) -> None:
    roles.write_text("[tokens.x]\n")
    with pytest.raises(InvalidInput, match="sha256"):
        run("create", "new", "--role", "read", "--roles", roles)
    assert roles.read_text() == "[tokens.x]\n"


def test_two_changes_at_once_do_not_undo_each_other(roles: Path) -> None:
    roles.with_name("roles.toml.new").write_text("")
    with pytest.raises(Contradiction, match="another process"):
        run("create", "new", "--role", "read", "--roles", roles)
    assert not roles.exists()
