"""A log whose pages do not fit is refused before one is read, which would kill the process or lose records."""

import random
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from deltasync.core.errors import StorageFailed
from deltasync.storage.lmdb_pages import check_pages
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions

# Whatever is in the log is read, and then so much is written that all free pages are looked at.
_USE = """
import sys
from pathlib import Path
from deltasync.core.errors import StorageFailed
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions

try:
    log = LmdbStore(LogOptions(directory=Path(sys.argv[1]), max_bytes=1 << 24))
    log.items("")
    for stream in log.streams():
        for record in log.read(stream):
            bytes(record.payload)
    for number in range(100):
        log.append("new", number, 0, 0, bytes(20_000)).result()
except StorageFailed as error:
    print(error)
    sys.exit(3)
log.close()
"""


def written(folder: Path, seed: int) -> Path:
    """A log in which much was written and dropped again, in transactions of one and of several writes."""
    rng = random.Random(seed)
    log = LmdbStore(LogOptions(directory=folder, max_bytes=1 << 24))
    for number in range(120):
        log.append("s", number, 0, 0, bytes(rng.choice([10, 3000, 100_000])))
        if rng.random() < 0.4:
            log.drop("s", rng.randrange(max(0, number - 5), number + 1), 0)
        if rng.random() < 0.3:
            log.put(f"small/{number}", bytes(10)).result(20)
    log.close()
    return folder / "data.mdb"


@pytest.mark.parametrize("seed", range(10))
def test_a_log_is_whole_after_each_of_many_transactions(tmp_path: Path, seed: int) -> None:
    """Its file may end before pages that were taken and given back."""
    rng, keys, shorter = random.Random(seed), list[bytes](), 0
    environment = lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=2)
    records, path = environment.open_db(b"records"), tmp_path / "data.mdb"
    for number in range(60):
        with environment.begin(write=True, db=records) as txn:
            for each in range(rng.randint(1, 8)):
                if rng.random() < 0.6 or not keys:
                    keys.append(b"%d/%d" % (number, each))
                    txn.put(keys[-1], bytes(rng.choice([10, 3000, 100_000, 1 << 20])))
                else:
                    txn.delete(keys.pop())  # Often one that was put in this transaction.
        shorter += path.stat().st_size < (environment.info()["last_pgno"] + 1) * 4096
        check_pages(path)
    environment.close()
    assert shorter, "there were no such pages"


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_is_cut_off_is_used_without_harm_or_refused(tmp_path: Path, seed: int) -> None:
    path = written(tmp_path / "log", seed)
    whole = path.read_bytes()
    pages, rng, ended = len(whole) // 4096, random.Random(seed), set()
    for kept in [pages, pages - 1, *rng.sample(range(2, pages), 5)]:
        path.write_bytes(whole[: kept * 4096])
        used = subprocess.run([sys.executable, "-c", _USE, path.parent], capture_output=True, text=True)
        assert used.returncode in (0, 3), (kept, used.returncode, used.stderr)
        assert used.returncode == 0 or "is cut off: pages are missing at the end of data.mdb" in used.stdout
        ended.add(used.returncode)
    assert ended == {0, 3}


def test_a_log_without_its_last_page_is_refused(tmp_path: Path) -> None:
    log = LmdbStore(LogOptions(directory=tmp_path, max_bytes=1 << 24))
    log.append("s", 1, 0, 0, bytes(100_000)).result(20)
    log.close()
    path = tmp_path / "data.mdb"
    for missing in (1, 4096, 50_000):
        path.write_bytes(path.read_bytes()[:-missing])
        with pytest.raises(StorageFailed, match=r"is cut off: .* restore a backup"):
            LmdbStore(LogOptions(directory=tmp_path, max_bytes=1 << 24))


def test_a_page_that_is_not_what_it_was_is_an_error_unless_it_is_free(tmp_path: Path) -> None:
    log = LmdbStore(LogOptions(directory=tmp_path, max_bytes=1 << 24))
    log.put("name", b"value")
    log.append("s", 1, 0, 0, b"payload").result(20)
    log.close()
    path, ended = tmp_path / "data.mdb", set()
    whole = path.read_bytes()
    for start in range(2 * 4096, len(whole), 4096):
        path.write_bytes(whole[:start] + bytes(4096) + whole[start + 4096 :])
        used = subprocess.run([sys.executable, "-c", _USE, path.parent], capture_output=True, text=True)
        assert used.returncode in (0, 3), used.stderr
        assert used.returncode == 0 or "cannot be opened (data.mdb: " in used.stdout
        ended.add(used.returncode)
    assert ended == {0, 3}
