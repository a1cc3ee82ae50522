"""A rank that plays the scenarios of a package for its number of ranks, and writes down how each ended."""

import json
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch.distributed as dist

from tests.support.ranks import leave
from tests.support.scenarios import ALONE_SECONDS, play_all


def main(package: str, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=ALONE_SECONDS))
    outcome = {}
    for name, failure in play_all(import_module(package).SCENARIOS.of(dist.get_world_size())):
        outcome[name] = failure
        Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
