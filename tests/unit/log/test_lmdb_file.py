"""The size of an LMDB file: one that was cut short is refused, and every file that LMDB wrote is accepted."""

import os
import random
import shutil
from pathlib import Path

import lmdb
import pytest

from deltasync.base.errors import StorageFailed
from deltasync.log.lmdb_store import check_size


def write_randomly(folder: Path, seed: int, commits: int) -> int:
    """Write and delete records, and check the file after every commit; return how often it lacked free pages."""
    rng, keys, shorter, path = random.Random(seed), list[bytes](), 0, folder / "data.mdb"
    environment = lmdb.open(str(folder), map_size=1 << 28, max_dbs=4, sync=False)
    records = environment.open_db(b"records")
    for _ in range(commits):
        with environment.begin(write=True, db=records) as txn:
            for _ in range(rng.randrange(1, 30)):
                if rng.random() < 0.6:
                    keys.append(b"%08d" % len(keys))
                    txn.put(keys[-1], rng.randbytes(rng.choice([10, 100, 3000, 20000])))
                elif keys:
                    cursor = txn.cursor()
                    more = cursor.set_range(rng.choice(keys))
                    for _ in range(rng.randrange(40)):
                        more = more and cursor.delete()
        check_size(path)
        shorter += path.stat().st_size < (environment.info()["last_pgno"] + 1) * 4096
    environment.close()
    return shorter


def test_files_of_lmdb_without_their_last_free_pages_are_accepted(tmp_path: Path) -> None:
    assert write_randomly(tmp_path, 1, 600) > 0


def test_a_truncated_file_is_refused_unless_only_free_pages_are_missing(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    write_randomly(whole, 2, 200)
    size, refused = (whole / "data.mdb").stat().st_size, list[tuple[int, str]]()
    for length in range(2 * 4096, size, 4096 + 512):
        shutil.rmtree(cut, ignore_errors=True)
        shutil.copytree(whole, cut)
        os.truncate(cut / "data.mdb", length)
        try:
            check_size(cut / "data.mdb")
        except StorageFailed as error:
            refused.append((length, str(error)))
            continue
        environment = lmdb.open(str(cut), map_size=1 << 28, max_dbs=4)
        with environment.begin(db=environment.open_db(b"records")) as txn:
            assert all(len(value) for _, value in txn.cursor()), "it reads every record"
        environment.close()
    assert len(refused) > 10
    for length, said in refused:
        assert f"{cut / 'data.mdb'} was cut short: it has {length} bytes, but needs " in said


@pytest.mark.parametrize("content", [None, b"", b"no log", bytes(100_000)])
def test_other_files_are_left_to_lmdb(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "data.mdb").write_bytes(content)
    check_size(tmp_path / "data.mdb")
