"""Which deltasync this is."""

import json
import os
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version

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
    """The commit that it was built from, where that is known: images say it in DELTASYNC_COMMIT, and pip where it
    has fetched it with git. Else empty.
    """
    if commit := os.environ.get("DELTASYNC_COMMIT"):
        return commit
    try:
        said = distribution(_PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    found = json.loads(said) if said else {}
    return str(found.get("vcs_info", {}).get("commit_id", ""))
