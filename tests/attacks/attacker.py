"""The process that attacks.

python -m tests.attacks.attacker NAME       with the target as JSON on its standard input
"""

import dataclasses
import json
import sys

from tests.attacks.families import ATTACKS
from tests.attacks.target import Target


def main(name: str) -> None:
    target = Target(**json.load(sys.stdin))
    print(json.dumps(dataclasses.asdict(ATTACKS[name].run(target))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
