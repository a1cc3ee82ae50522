"""What a flood of messages has taken is returned to the system, however scattered what stays is."""

import sys

import pytest
from tests.support.programs import run_program

_PROGRAM = """
import sys
from pathlib import Path
from deltasync.base.process import FreedMemory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

assert keep_freed_memory()
freed = FreedMemory(50_000_000)
assert not freed.give_back()
for _ in range(2):
    blocks = [b"x" * (30_000 + number % 2) for number in range(10_000)]
    kept = blocks[::50]
    del blocks
    assert resident() > 250_000_000
    assert freed.give_back()
    assert resident() < 150_000_000
    assert not freed.give_back()  # It is returned already.
    del kept
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc tells what it keeps")
def test_what_is_too_much_is_returned_once() -> None:
    done = run_program(sys.executable, "-c", _PROGRAM)
    assert done.returncode == 0, done.stderr
