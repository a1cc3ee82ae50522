"""Runs scripts on several gloo ranks."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import TypeAlias, Union

import torch
from tests.support.forks import AT_START, Program, forked
from tests.support.programs import LONGEST_SECONDS, ROOT, run_program, started
from torch.distributed import TCPStore  # type: ignore[attr-defined]

Rank: TypeAlias = Union["subprocess.Popen[str]", Program]


def torchrun(*arguments: str, ranks: int = 2) -> str:
    """Run `torchrun ... ARGUMENTS`; returns its output. The test fails if a rank fails."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    done = run_program(*launcher, *arguments)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def run_ranks(*arguments: str, ranks: int = 2) -> str:
    """Run `python ARGUMENTS` like torchrun, with the store in this process, which saves a process.

    Returns the output. If a rank fails, ends the others and fails the test.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with ThreadPoolExecutor(ranks) as threads, ExitStack() as stack:
        processes = [
            stack.enter_context(_rank(*arguments, environment=_environment(store, rank, ranks)))
            for rank in range(ranks)
        ]
        outputs = list(threads.map(lambda process: _output(process, processes), processes))
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    assert not failed, "\n".join(f"rank {rank}:\n{outputs[rank][-6000:]}" for rank in failed)
    return "".join(outputs)


def _rank(*arguments: str, environment: Mapping[str, str]) -> AbstractContextManager[Rank]:
    """Do not fork on a GPU machine, because CUDA does not survive a fork, nor with interpreter options."""
    if torch.cuda.is_available() or "PYTHONOPTIMIZE" in os.environ:
        return started(sys.executable, *arguments, environment=environment)
    return forked(*arguments, environment=environment)


def _environment(store: TCPStore, rank: int, ranks: int) -> dict[str, str]:
    """The variables that torchrun sets for its ranks."""
    return {
        # By their hashes of names do ranks find what others send them when a table is moved (gloo heeds tags).
        **AT_START,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _output(process: Rank, of_all: Sequence[Rank]) -> str:
    """The output of a rank until its end; ends the other ranks if it fails."""
    try:
        output, _ = process.communicate(timeout=LONGEST_SECONDS)
    finally:
        if process.returncode != 0:
            for each in of_all:
                each.kill()
    return output


def leave() -> None:
    """End a rank without the interpreter's shutdown.

    That would abort if a gloo thread of torch 2.13 frees a tensor at that time, for example of a last barrier
    ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
