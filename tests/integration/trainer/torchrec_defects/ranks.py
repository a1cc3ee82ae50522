"""A rank that plays the scenarios for its number of ranks, and writes down how each ended."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.integration.trainer.torchrec_defects.registry import ALONE_SECONDS, play_all
from tests.support.ranks import leave


def main(folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=ALONE_SECONDS))
    outcome = {}
    for name, failure in play_all(dist.get_world_size()):
        outcome[name] = failure
        Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(outcome))
    leave()


if __name__ == "__main__":
    from tests.integration.trainer.torchrec_defects import scenarios  # noqa: F401

    main(sys.argv[1])
