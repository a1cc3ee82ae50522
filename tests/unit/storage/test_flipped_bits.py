"""Bits that change in files of tables and views: what a service gives is right, or the damage is named."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support import flips

from deltasync.storage.data_directory import RESTORE

RUNS = 8


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file, or several."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        bit = rng.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def verdict(found: dict[str, Any], right: dict[str, Any]) -> str:
    """What became of it; an AssertionError if that is wrong."""
    if "refused" in found:
        assert RESTORE in found["refused"]
        return "refused"
    assert "given" in found, found
    assert found["consumers"] == right["consumers"]
    assert found["position"] == right["position"]
    named = any("damaged" in each or flips.VIEW_IS_LOST in each for each in found["said"])
    for what, expected in right["given"].items():
        given = found["given"][what]
        if isinstance(given, str):
            assert "other bits than were stored" in given
            named = True
            continue
        everything = right["given"]["model 0" if what.startswith("model") else what]
        for table, rows in expected.items():
            assert rows.items() <= given.get(table, {}).items(), (what, table)
        for table, rows in given.items():
            for row, bits in rows.items():
                known = expected.get(table, {}).get(row, everything.get(table, {}).get(row))
                assert bits == known, (what, table, row)
    return "named" if named else "harmless" if found["given"] == right["given"] else "sent again"


@pytest.mark.parametrize("where", ["tables", "views"])
@pytest.mark.parametrize("flushed", [True, False], ids=["all flushed", "rows in the log"])
def test_no_bit_changes_what_is_given_unnoticed(tmp_path: Path, where: str, flushed: bool) -> None:
    whole, copy, rng, seen = tmp_path / "whole", tmp_path / "copy", random.Random(where), Counter[str]()
    flips.write(whole, flushed=flushed)
    shutil.copytree(whole, copy)
    right = flips.outcome(copy)
    assert "given" in right, right
    pattern = {"tables": "models/*/tables/*/*", "views": "models/*/views/*/*/*"}[where]
    files = sorted(path.relative_to(whole) for path in whole.glob(pattern))
    for _ in range(RUNS):
        shutil.rmtree(copy)
        shutil.copytree(whole, copy)
        flip(copy / rng.choice(files), rng)
        seen[verdict(flips.outcome(copy), right)] += 1
    assert len(seen) > 1, f"no bit was noticed: {seen}"
