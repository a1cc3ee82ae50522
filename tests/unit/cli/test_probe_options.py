"""How often a service may probe itself."""

import pytest
from click.testing import CliRunner

from deltasync.cli.main import cli


@pytest.mark.parametrize("seconds", ["0.01", "31", "300"])
def test_a_probe_is_as_frequent_as_its_alert_needs(seconds: str) -> None:
    """`DeltasyncProbeFails` fires after a minute without a row: two of them have to be lost until then."""
    done = CliRunner().invoke(cli, ["serve", "--probe-seconds", seconds])
    assert (done.exit_code, "'--probe-seconds'" in done.output, "0.1<=x<=30" in done.output) == (2, True, True)
