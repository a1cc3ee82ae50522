"""A history is sent in pages of bounded size, whatever the number of replicas and lines."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.command import deltasync
from tests.support.fleet import admin_of
from tests.support.server import RunningService

from deltasync.consumers.follow import HistoryLine, history_stream, pack_line
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions

REPLICAS, LINES = 3000, 8
VERSIONS = 10_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service whose consumer `predictors` has a long history of many replicas."""
    folder: Path = tmp_path_factory.mktemp("history") / "data"
    with RunningService(folder):
        pass
    log = LmdbStore(LogOptions(directory=folder / "log"))
    names = [f"replica-{number}" for number in range(REPLICAS)]
    for number in range(1, LINES + 1):
        replicas = dict.fromkeys(names, number)
        line = HistoryLine(unix_ns=number, watched_ns=number, version=number, replicas=replicas)
        log.append(history_stream("predictors"), line.watched_ns, 0, 0, pack_line(line)).result()
    log.close()
    with RunningService(folder) as service:
        yield service


def test_a_page_has_a_bounded_number_of_versions_and_names_the_next(service: RunningService) -> None:
    first = service.get_json("/consumers/predictors/history")
    assert [line["version"] for line in first["lines"]] == [1, 2, 3]
    assert sum(len(line["replicas"]) for line in first["lines"]) <= VERSIONS
    second = service.get_json(f"/consumers/predictors/history?from_ns={first['next_ns']}")
    assert [line["version"] for line in second["lines"]] == [4, 5, 6]
    last = service.get_json("/consumers/predictors/history?last=2")
    assert ([line["version"] for line in last["lines"]], last["next_ns"]) == ([7, 8], None)


@pytest.mark.parametrize("last", [1, 3, 4, 7, LINES, 1000])
def test_a_client_gets_the_newest_lines_of_all_pages(service: RunningService, last: int) -> None:
    versions = [line["version"] for line in admin_of(service).history("predictors", last=last)]
    assert versions == list(range(1, LINES + 1))[-last:]


def test_the_command_shows_all_pages(service: RunningService) -> None:
    shown = deltasync("consumers", "history", "predictors", "--service", service.http)[1].splitlines()
    assert [line.split()[2] for line in shown[1:]] == [str(number) for number in range(1, LINES + 1)]
