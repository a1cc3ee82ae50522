"""Whether files are mapped privately, and how much memory there is."""

import logging
import threading
from pathlib import Path

import pytest

from deltasync.core.position import Decision
from deltasync.storage import private_memory
from deltasync.storage.private_memory import PrivateMemory, fits, memory_bytes

GIB = 1 << 30
LARGE = str(1 << 62)


@pytest.mark.parametrize(
    ("mapped", "size", "yes", "reason"),
    [
        (0, 4 * GIB, True, "those of this process take 4.00 GiB, at most half of the 8.00 GiB that there are"),
        (
            0,
            4 * GIB + 1,
            False,
            "take 4.00 GiB, more than half of the 8.00 GiB that there are; with more, small cuts",
        ),
        (3 * GIB, GIB, True, "take 4.00 GiB, at most half"),
        (3 * GIB, GIB + 1, False, "more than half"),
    ],
)
def test_half_of_the_memory_is_for_tables(mapped: int, size: int, yes: bool, reason: str) -> None:
    decision = fits(mapped, size, 8 * GIB)
    assert decision.yes is yes
    assert reason in decision.reason


def test_what_is_decided_is_said_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    memory = PrivateMemory(100)
    with caplog.at_level(logging.INFO):
        assert [memory.take(size) for size in (20, 30, 1, 2, 0)] == [True, True, False, False, True]
        memory.give_back(30)
        assert memory.take(30)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "tables are kept in memory",
        "tables are mapped files",
        "tables are kept in memory",
    ]


def test_memory_is_given_back_by_whoever_takes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mappings in cycles are freed by a collection, which begins wherever something is made, also in `take`."""
    memory = PrivateMemory(100)
    assert memory.take(40)

    def collected(*sizes: int) -> Decision:
        memory.give_back(40)
        return fits(*sizes)

    with monkeypatch.context() as patch:
        patch.setattr(private_memory, "fits", collected)
        taking = threading.Thread(target=memory.take, args=(10,), daemon=True)
        taking.start()
        taking.join(10)
    assert not taking.is_alive()
    assert [memory.take(size) for size in (41, 40)] == [False, True]


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a.slice/b.service\n", {"a.slice/b.service/memory.max": "max", "a.slice/memory.max": "300"}, 300),
        ("0::/a.slice/b.service\n", {"a.slice/b.service/memory.max": "200", "a.slice/memory.max": "300"}, 200),
        ("0::/\n", {"memory.max": "400"}, 400),
        ("0::/a\n", {"a/memory.max": "400", "a/memory.high": "350"}, 350),
        ("0::/a\n", {"a/memory.max": "400", "a/memory.high": "max"}, 400),
        ("3:cpu:/x\n2:memory:/x/y\n0::/\n", {"memory/x/memory.limit_in_bytes": "500"}, 500),
        ("2:cpu,memory:/gone\n", {"memory/memory.limit_in_bytes": "600"}, 600),
        ("2:memory:/x\n", {"memory/x/memory.limit_in_bytes": LARGE}, None),
        ("", {}, None),
    ],
)
def test_a_control_group_limits_memory(
    tmp_path: Path, own: str, files: dict[str, str], expected: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(own)
    machine = memory_bytes(tmp_path / "none", tmp_path / "none")
    assert memory_bytes(tmp_path, tmp_path) == (expected or machine)
    assert machine > 1 << 26


@pytest.mark.parametrize(
    ("overcommit", "promised", "expected"), [("0", 900, 700), ("1", 900, 700), ("2", 900, 100), ("2", 1100, 0)]
)
def test_what_other_processes_have_is_not_there(
    tmp_path: Path, overcommit: str, promised: int, expected: int
) -> None:
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "overcommit_memory").write_text(f"{overcommit}\n")
    lines = ["MemAvailable: 700 kB", "CommitLimit: 1000 kB", f"Committed_AS: {promised} kB", "HugePages_Total: 0"]
    (tmp_path / "meminfo").write_text("\n".join(lines))
    assert memory_bytes(tmp_path / "none", tmp_path) == expected << 10


def test_this_machine_has_memory() -> None:
    assert 1 << 26 < memory_bytes() <= memory_bytes(Path("/none"), Path("/none"))
