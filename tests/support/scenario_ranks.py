"""A rank that runs scenarios of a package and records their outcomes.

Arguments: the package, a folder, and the scenarios to run with this number of ranks; all if none are named.
"""

import json
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch.distributed as dist
from tests.support.ranks import leave
from tests.support.scenarios import ALONE_SECONDS, play_all


def main(package: str, folder: str, *names: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=ALONE_SECONDS))
    outcome = {}
    wanted = [
        one for one in import_module(package).SCENARIOS.of(dist.get_world_size()) if not names or one.id in names
    ]
    for name, failure in play_all(wanted):
        outcome[name] = failure
        Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(outcome))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
