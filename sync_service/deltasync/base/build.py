"""Which deltasync this is."""

import json
import os
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

_PACKAGE = "deltasync"


@cache
def built_version() -> str:
    """The version of the package; empty where it is not installed."""
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return ""


@cache
def built_commit() -> str:
    """The commit that it was built from, or is run from; empty where that is not known.

    Images name it in DELTASYNC_COMMIT, and pip does if it has fetched it with git. Of a checkout that is used in
    place git says it, once in a process, with `-dirty` if files have changed since the commit.
    """
    if commit := os.environ.get("DELTASYNC_COMMIT"):
        return commit
    try:
        said = distribution(_PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    found = json.loads(said) if said else {}
    if found.get("dir_info", {}).get("editable"):
        return _commit_of_checkout(Path(unquote(urlsplit(found["url"]).path)))
    return str(found.get("vcs_info", {}).get("commit_id", ""))


def _commit_of_checkout(folder: Path) -> str:
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    command = [git, "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # Git refuses a folder of another user, for one.
        return ""
    return done.stdout.strip()
