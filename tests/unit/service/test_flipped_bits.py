"""Bits that change in files of checkpoints: a service gives the right rows, or waits for those that are lost."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tests.support import flips

RUNS = 8


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file, or several."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        bit = rng.randrange(len(content) * 8)
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def given_at(version: int, folder: Path) -> object:
    """What a replica that holds nothing is given of the model at a version."""
    flips.write(folder / f"at-{version}", versions=version)
    return flips.outcome(folder / f"at-{version}")["given"]["model 0"]


@pytest.mark.parametrize("checkpoints", [[3], [2, 4], [1, 2, 3, 4, 5]])
def test_no_bit_of_a_checkpoint_changes_what_is_given(tmp_path: Path, checkpoints: list[int]) -> None:
    """A model that lacks rows is not there until its trainer has sent them; a view that does is made anew."""
    whole, copy, rng, seen = tmp_path / "whole", tmp_path / "copy", random.Random(len(checkpoints)), Counter[str]()
    flips.write(whole, checkpoints)
    shutil.copytree(whole, copy)
    right = flips.outcome(copy)
    assert right["position"], right
    files = sorted(path.relative_to(whole) for path in (whole / "checkpoints").rglob("*") if path.is_file())
    for _ in range(RUNS):
        shutil.rmtree(copy)
        shutil.copytree(whole, copy)
        name = rng.choice(files)
        flip(copy / name, rng)
        found = flips.outcome(copy)
        assert "consumers" in found, found
        named = any(name.name in each for each in found["said"])
        if found["position"] is None:
            assert named
            seen["named, and the model is not there"] += 1
            continue
        if found["position"] != right["position"]:
            # A file that the newest two checkpoints share: the model goes back, and its trainer sends the rest.
            version = found["position"][0]
            assert named
            assert version in checkpoints[:-2]
            assert found["given"]["model 0"] == given_at(version, tmp_path)
            seen["named, and the model goes back"] += 1
            continue
        if any("its view cannot be rebuilt" in each for each in found["said"]):
            assert named
            found["given"]["view 0"] = right["given"]["view 0"]
        assert found["given"] == right["given"]
        seen["named" if named else "not read"] += 1
    assert sum(seen.values()) - seen["not read"] > 0, f"no bit was noticed: {seen}"
