"""Having rows deleted: by the client library, by HTTP and by the command line, and what ranks are told."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from click.testing import CliRunner
from tests.integration.api.conftest import publish_everything
from tests.support.fleet import admin_of
from tests.support.server import TOKEN, RunningService
from tests.support.wire import ITEM, USER, RankStream, part, random_rows

from deltasync.base.errors import DeltasyncError, InvalidInput, NotFound, NotPermitted
from deltasync.cli.tables import rows
from deltasync.client import Endpoint
from deltasync.client.admin import Admin


@pytest.fixture
def rank(running: RunningService) -> Iterator[RankStream]:
    """A rank that takes deletes, and has published everything."""
    with RankStream(running.grpc, takes_deletes=True) as stream:
        publish_everything(stream, random_rows(0))
        yield stream


def post(service: RunningService, body: Any, token: str = TOKEN) -> tuple[int, Any]:
    """HTTP status and JSON of the answer; the content type is the one that `curl -d` names."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310
        service.http + "/deletes", text, {"Authorization": f"Bearer {token}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310
            return response.status, json.load(response)
    except HTTPError as error:
        with error:
            return error.code, json.load(error)


def answered(rank: RankStream, step: int, *numbers: int) -> list[Any]:
    """What a rank is asked for in the answer to a part in which it has met these."""
    requests = part(step, [])
    requests[-1].close.deletes.extend(numbers)
    rank.send(*requests)
    return list(rank.receive().sealed.deletes)


def test_ranks_are_asked_until_they_say_that_it_is_done(running: RunningService, rank: RankStream) -> None:
    pending = admin_of(running).delete_rows("clicks", ITEM.name, [7, 3])
    assert (pending["model"], pending["table"], pending["rows"]) == ("clicks", ITEM.name, 2)
    assert pending["reason"] == "run run-1 deletes them with one of its next cuts"
    (asked,) = answered(rank, 2)
    assert (asked.number, asked.table, list(asked.ids)) == (pending["asked_unix_ns"], 1, [3, 7])
    assert admin_of(running).pending_deletes() == [pending]
    assert answered(rank, 3, asked.number) == []
    assert admin_of(running).pending_deletes() == []
    events = running.get("/metrics")[1]
    for event in ("delete_requested", "rows_deleted"):
        assert f'deltasync_events_total{{event="{event}"}} 1.0' in events


def test_a_run_that_comes_later_is_asked_with_its_first_answer(running: RunningService, rank: RankStream) -> None:
    number = admin_of(running).delete_rows("clicks", USER.name, [1])["asked_unix_ns"]
    with RankStream(running.grpc, run="run-2", started=2, takes_deletes=True) as later:
        assert [each.number for each in later.opened().deletes] == [number]


def test_a_rank_that_does_not_know_of_deletes_is_not_asked(running: RunningService, rank: RankStream) -> None:
    admin_of(running).delete_rows("clicks", USER.name, [1])
    with RankStream(running.grpc, run="run-2", started=2) as old:
        assert not old.opened().deletes
        assert admin_of(running).pending_deletes()[0]["reason"].endswith("does not support deletes: update it")


def test_over_http(running: RunningService, rank: RankStream) -> None:
    wanted = {"model": "clicks", "table": USER.name, "ids": [5, 1]}
    status, line = post(running, wanted)
    assert status == 202
    assert running.get_json("/deletes") == [line]
    assert line == {
        "model": "clicks",
        "table": USER.name,
        "rows": 2,
        "asked_unix_ns": admin_of(running).pending_deletes()[0]["asked_unix_ns"],
        "reason": "run run-1 deletes them with one of its next cuts",
    }
    assert post(running, wanted, token="wrong")[0] == 403  # noqa: S106
    with pytest.raises(NotPermitted):
        Admin(Endpoint(running.http, "wrong")).delete_rows("clicks", USER.name, [1])
    assert post(running, wanted | {"model": "bids"})[0] == 404
    assert post(running, wanted | {"ids": [40]})[0] == 400
    assert len(running.get_json("/deletes")) == 1


WANTED = {"model": "clicks", "table": USER.name, "ids": [1]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "body.1: Expecting property name"),
        (b"[]", "body: Input should be a valid dictionary"),
        ({"model": "clicks", "row": 1}, "body.row: Extra inputs are not permitted"),
        ({"model": "clicks", "ids": [1]}, "body.table: Field required"),
        (WANTED | {"ids": [1, "x"]}, "body.ids.1: Input should be a valid integer"),
        (WANTED | {"ids": [True]}, "body.ids.0: Input should be a valid integer"),
        (WANTED | {"ids": [1.5]}, "body.ids.0: Input should be a valid integer"),
        (WANTED | {"ids": [2**63]}, "an id does not fit into 64 bits"),
        (WANTED | {"ids": 1}, "body.ids: Input should be a valid list"),
        (WANTED | {"ids": [10**400]}, "an id does not fit into 64 bits"),
        (WANTED | {"ids": []}, "use 1 to 100000"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_body_says_what_is_wrong(running: RunningService, rank: RankStream, body: Any, said: str) -> None:
    status, answer = post(running, body)
    assert (status, answer["error"]) == (400, "InvalidInput")
    assert said in answer["message"]
    assert post(running, body, token="wrong")[0] == 403  # noqa: S106  # before any of it is read
    assert running.get_json("/deletes") == []


def test_as_many_ids_over_http_as_a_request_may_have(running: RunningService, rank: RankStream) -> None:
    status, answer = post(running, WANTED | {"ids": [2**40 - each for each in range(100_000)]})
    assert (status, "is outside table" in answer["message"]) == (400, True)


@pytest.mark.parametrize(
    ("table", "ids", "error", "message"),
    [
        ("nowhere", [1], NotFound, "model 'clicks' has no table 'nowhere'; its embedding tables: "),
        (USER.name, [40], InvalidInput, f"row 40 is outside table '{USER.name}' of model 'clicks'"),
        (USER.name, [-1], InvalidInput, f"row -1 is outside table '{USER.name}' of model 'clicks'"),
        (USER.name, [3.7], InvalidInput, "ids of type float, expected integers"),
        (USER.name, [1, True], InvalidInput, "ids of type bool, expected integers"),
        (USER.name, ["7"], InvalidInput, "ids of type str, expected integers"),
        (USER.name, "7", InvalidInput, "ids of type str, expected integers"),
        (USER.name, [float("nan")], InvalidInput, "ids of type float, expected integers"),
        (USER.name, np.array([True, False]), InvalidInput, r"ids of type bool and shape \[2\], expected integers"),
        (USER.name, np.array([3.7]), InvalidInput, "ids of type float64"),
        (USER.name, 3, InvalidInput, r"shape \[\], expected integers"),
        (
            USER.name,
            [10**5000],
            InvalidInput,
            "an id does not fit into 64 bits, expected at most 9223372036854775807",
        ),
        (USER.name, [], InvalidInput, "use 1 to 100000"),
        (USER.name, range(100_001), InvalidInput, "use 1 to 100000"),
    ],
)
def test_what_is_refused(
    running: RunningService, rank: RankStream, table: str, ids: Any, error: type[DeltasyncError], message: str
) -> None:
    with pytest.raises(error, match=message):
        admin_of(running).delete_rows("clicks", table, ids)
    assert admin_of(running).pending_deletes() == []


@pytest.mark.parametrize("ids", [{1, 5}, range(1, 3), np.array([1, 5], np.uint8), iter([1, 5])])
def test_integers_of_any_kind_name_rows(running: RunningService, rank: RankStream, ids: Any) -> None:
    assert admin_of(running).delete_rows("clicks", USER.name, ids)["rows"] == 2


def test_by_the_command_line(running: RunningService, rank: RankStream) -> None:
    service = ["--service", running.http]
    arguments = ["delete", "clicks", USER.name, "5", "1", *service]
    done = CliRunner(env={"DELTASYNC_TOKEN": TOKEN}).invoke(rows, arguments)
    assert done.output == (
        f"requested the deletion of 2 rows of table {USER.name} of model clicks: run run-1 deletes "
        "them with one of its next cuts\n"
    )
    titles, line = CliRunner().invoke(rows, ["pending", *service]).output.splitlines()
    assert titles.split() == ["model", "table", "rows", "asked", "waits", "for"]
    model, table, count, asked, why = line.split(maxsplit=4)
    assert (model, table, count) == ("clicks", USER.name, "2")
    assert np.datetime64(asked.removesuffix("Z")) <= np.datetime64("now")
    assert why == "run run-1 deletes them with one of its next cuts"
    assert CliRunner().invoke(rows, ["delete", "clicks", USER.name, *service]).exit_code == 2


def test_a_request_outlives_a_restart(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service, RankStream(service.grpc) as stream:
        publish_everything(stream, random_rows(0))
        number = admin_of(service).delete_rows("clicks", USER.name, [1])["asked_unix_ns"]
    with RunningService(tmp_path / "data") as service:
        assert admin_of(service).pending_deletes()[0]["asked_unix_ns"] == number
        with RankStream(service.grpc, run="run-2", started=2, takes_deletes=True) as stream:
            assert [each.number for each in stream.opened().deletes] == [number]
