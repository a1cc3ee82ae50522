"""Running a script on several gloo ranks."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(*arguments: str, ranks: int = 2) -> str:
    """Run `torchrun ... ARGUMENTS`; its output. A rank that fails, fails the test."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DELTASYNC_")}
    # What the tests import, the ranks import too.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*torchrun, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def leave() -> None:
    """End a rank that has done its work, without the interpreter's own shutdown.

    torch 2.13 now and then aborts in it ("terminate called without an active exception", no Python frame).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
