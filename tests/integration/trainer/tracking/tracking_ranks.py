"""The ranks of test_tracking: cases in training, one after the other. Hosts have two ranks.

Arguments: a folder for what was wrong, and "pipeline/case" any number of times.
"""

import faulthandler
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from tests.integration.trainer.tracking.cases import CASES
from tests.integration.trainer.tracking.pipelines import TRAININGS, stand_in_for_a_gpu
from tests.integration.trainer.tracking.run import Run
from tests.support.ranks import leave


def main(folder: str, *names: str) -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # A rank that hangs says where.
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    stand_in_for_a_gpu()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with (Path(folder) / f"{dist.get_rank()}.jsonl").open("w") as found:
        for name in names:
            training, case = name.split("/")
            problems = Run(CASES[case], TRAININGS[training]).problems()
            print(json.dumps([name, problems]), file=found, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
