"""Ranks end together even if their options or states differ, or one of them fails."""

from pathlib import Path

from tests.support.process import ServiceProcess
from tests.support.ranks import run_ranks


def test_no_rank_waits_for_ever(service: ServiceProcess) -> None:
    run_ranks(str(Path(__file__).with_name("agreement_ranks.py")), service.grpc)
