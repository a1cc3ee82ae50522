"""What a service does with what it finds on a machine: ports, folders, signals."""

import gc
import http.client
import json
import os
import re
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.support.damage import change_value, entries
from tests.support.process import ADMIN_TOKEN, ServiceProcess
from tests.support.server import RunningService
from tests.support.state import lag_of, rows_of
from tests.support.wire import (
    TABLES,
    USER,
    WHOLE,
    RankStream,
    ReplicaStream,
    ack,
    chunk,
    close,
    full_part,
    part,
    random_rows,
    size_of,
)

from deltasync.client import Admin, Endpoint
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.records import address_of, name_of
from deltasync.wire.messages import position_from_message

WIDE = TableSpec("wide", 1 << 16, 1)


def refusal(data_dir: Path, *arguments: str) -> str:
    """What a service that does not start says: one line, after what it logs."""
    done = ServiceProcess(data_dir, *arguments).run_to_end()
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.stderr.rstrip().endswith(said[0]), done.stderr
    assert len(said) == 1
    return said[0]


def publishing_wide(service: RunningService, model: str) -> RankStream:
    """A rank that publishes a cut of 1.3 MB, of which it has heard nothing yet."""
    rank = RankStream(service.grpc, model=model, tables=[WIDE], shards=[Shard.whole(WIDE)])
    rank.opened()
    rank.send(chunk(1, 0, range(WIDE.rows), np.ones((WIDE.rows, 1), "<f4")), close(1, WIDE.rows, full=True))
    return rank


def publish_wide(service: RunningService, model: str) -> None:
    with publishing_wide(service, model) as rank:
        rank.sealed()


def test_two_services_do_not_share_a_folder(running: RunningService) -> None:
    data_dir = running.options.data_dir
    said = f"Error: {data_dir} is in use by another service: give this one its own --data-dir"
    assert refusal(data_dir) == said
    assert running.get("/readyz")[0] == 200


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
def test_a_port_in_use_is_an_error_that_says_which(running: RunningService, tmp_path: Path, option: str) -> None:
    address = running.grpc if option == "--grpc-port" else running.http
    port = address.rpartition(":")[2]
    said = refusal(tmp_path / "other", option, port)
    assert said == f"Error: cannot listen on 127.0.0.1:{port}; choose another {option}, or 0 for any free port"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            (
                ("--insecure", "--host", "192.0.2.1", "--http-port", port),
                "cannot listen on 192.0.2.1: Cannot assign requested address; choose a --host that is an address "
                "of this machine",
            )
            for port in ("0", "18080")
        ),
        (
            ("--data-dir", "{}/file/data"),
            r"{}/file/data cannot be made: Not a directory \(.*\): move away the file of that name, or choose "
            "another --data-dir$",
        ),
    ],
)
def test_what_keeps_it_from_starting_is_an_error_that_says_so(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").write_text("")
    found = refusal(tmp_path / "data", *(each.format(tmp_path) for each in arguments))
    assert re.match(f"Error: {said.format(tmp_path)}", found)


def test_a_model_whose_log_is_damaged_from_its_first_version_lacks_all(tmp_path: Path) -> None:
    """Its trainer sends every row again."""
    process = ServiceProcess(tmp_path / "data", "--consumer", "probes=clicks", log=tmp_path / "log")
    with process:
        with RankStream(process.grpc) as rank:
            rank.publish_all()
            rank.send(*part(2, [(0, [2], random_rows(0)[0][:1])]))
            rank.sealed()
        process.kill()
        log = process.data_dir / "log"
        found = [key for key in entries(log, "records") if key.startswith(b"cuts/")]
        key = next(key for key in found if address_of(key)[1] == 1)
        change_value(log, "records", key, 100)
        process.start()
        said = f"the log's {name_of(*address_of(key))} is damaged"
        process.wait_for_line(f"the log is damaged after version 0.*{said}")
        status, lag = process.get("/consumers/probes")
        assert (status, process.get("/readyz")[0]) == (503, 503)
        assert "model 'clicks' is still recovering; try again: it lacks every row" in lag
        with RankStream(process.grpc, run="s", started=2) as rank:
            assert rank.publish_all(7).number == 1
        assert rows_of(process)[USER.name].tobytes() == random_rows(7)[0].tobytes()


def log_bytes(service: ServiceProcess) -> float:
    (line,) = (each for each in service.get("/metrics")[1].splitlines() if each.startswith("deltasync_log_bytes"))
    return float(line.split()[1])


def test_a_drain_lets_the_open_cut_finish(tmp_path: Path) -> None:
    """On SIGTERM: what was under way is sealed and acknowledged, and is there after the restart."""
    rows = random_rows(0)
    process = ServiceProcess(tmp_path / "data", "--consumer", "probes=clicks", "--drain-seconds", "20")
    held = [[WHOLE[0]], [WHOLE[1]]]
    with process:
        with (
            RankStream(process.grpc, shards=held[0], world_size=2) as first,
            RankStream(process.grpc, shards=held[1], world_size=2, rank=1) as second,
        ):
            first.opened()
            second.opened()
            before = log_bytes(process)
            first.send(*full_part(1, rows, held[0]))
            while log_bytes(process) < before + rows[0].nbytes:
                pass  # Until the cut has begun; the test's timeout bounds the wait.
            with ReplicaStream(process.grpc, consumer="probes") as replica:
                replica.until("progress")
                ended = threading.Thread(target=process.terminate)
                ended.start()
                assert "shutting down" in replica.refusal()[1]
            second.send(*full_part(1, rows, held[1]))
            assert first.sealed() == second.sealed()
            ended.join()
        assert process.process is not None
        assert process.process.returncode == 0
        process.start()
        assert rows_of(process)[USER.name].tobytes() == rows[0].tobytes()


def test_a_drain_does_not_wait_for_ever(tmp_path: Path) -> None:
    process = ServiceProcess(tmp_path / "data", "--drain-seconds", "0.1")
    with process, RankStream(process.grpc, world_size=2) as rank:
        rank.opened()
        rank.send(*full_part(1, random_rows(0), WHOLE))
        assert process.terminate() == 0


def test_a_full_log_refuses_parts_and_everything_else_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = random_rows(0)
    with RunningService(
        tmp_path / "data", log_max_bytes=2 << 20, checkpoint_bytes=1 << 19, look_seconds=1000
    ) as service:
        with RankStream(service.grpc) as rank:
            rank.opened()
            rank.send(*full_part(1, rows, WHOLE))
            position = rank.sealed()
        publish_wide(service, "first")
        with publishing_wide(service, "second") as rank:
            code, details = rank.refusal()
            assert code.name == "RESOURCE_EXHAUSTED"
            assert "raise --log-max-bytes" in details
        status, body = service.get("/readyz")
        assert (status, "the log is full" in body) == (503, True)
        with RankStream(service.grpc) as rank, ReplicaStream(service.grpc, held=position) as replica:
            assert replica.release()[0] == []  # It is asked to show what it holds.
            rank.opened()
            rank.send(*part(2, [(0, [7], rows[0][:1])]))
            assert rank.sealed().number == 2
            found, end = replica.release()
            assert end.position.version == 2
            replica.send(ack(size_of(found), position_from_message(end.position)))
        rows[0][7] = rows[0][0]
        found_rows = rows_of(service)
        for table, expected in zip(TABLES, rows, strict=True):
            assert found_rows[table.name].tobytes() == expected.tobytes()
        assert lag_of(service)["head"] == 2
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_what_the_service_keeps_is_its_own_to_read(tmp_path: Path) -> None:
    with ServiceProcess(tmp_path / "data") as process, RankStream(process.grpc) as rank:
        rank.publish_all()
        Admin(Endpoint(process.http, ADMIN_TOKEN)).make_checkpoint("clicks")
    kept = [process.data_dir, *process.data_dir.rglob("*")]
    assert {"endpoints.json", "lock", "data.mdb", "manifests", "data"} < {path.name for path in kept}
    modes = {path: path.stat().st_mode & 0o777 for path in kept}
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in kept}


def test_the_service_writes_down_where_it_listens(tmp_path: Path) -> None:
    with RunningService(tmp_path / "data") as service:
        found = json.loads((tmp_path / "data" / "endpoints.json").read_text())
        assert found == {"format": 1, "pid": os.getpid(), "grpc": service.grpc, "http": service.http}
    assert not (tmp_path / "data" / "endpoints.json").exists()


def test_answers_on_kept_http_connections_are_not_held_back(running: RunningService) -> None:
    """By Nagle's algorithm, which asyncio switches off only for sockets that say that they are TCP."""
    host, port = running.http.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/livez")
    assert connection.getresponse().read() == b"ok\n"
    (served,) = _sockets_to(connection.sock.getsockname())
    with served:
        assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
    connection.close()


def _sockets_to(peer: tuple[str, int]) -> list[socket.socket]:
    """Copies of this process's sockets that are connected to `peer`."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            each = socket.socket(fileno=os.dup(int(link.name)))
        except OSError:  # Closed meanwhile, or no socket.
            continue
        try:
            same = each.family == socket.AF_INET and each.getpeername() == peer
        except OSError:  # Not connected.
            same = False
        if same:
            found.append(each)
        else:
            each.close()
    return found
