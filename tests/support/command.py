"""Runs the `deltasync` command in the test's own process."""

import contextlib
import io
import os
from unittest import mock

import pytest

from deltasync.cli.main import main


def deltasync(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run the command; returns exit status, stdout and stderr. `environment` has DELTASYNC_ variables."""
    settings = {f"DELTASYNC_{name.upper()}": value for name, value in environment.items()}
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["deltasync", *arguments]),
        mock.patch.dict(os.environ, settings),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()
