"""`python -m tests.attacks`: attack, and tell what came of it."""

import argparse
import json
import sys
from pathlib import Path

from tests.attacks.families import ATTACKS
from tests.attacks.measure import measured
from tests.attacks.table import harms, table

from deltasync.kernels.compiled import warm

_BEGIN, _END = "<!-- attacks -->", "<!-- end of attacks -->"


def main() -> int:
    wanted = _arguments()
    if wanted.table:
        _write(table(*(json.loads(path.read_text()) for path in wanted.table)), wanted.into)
        return 0
    warm()  # Or every service would compile its kernels.
    found = []
    for name in wanted.names or ATTACKS:
        figures = measured(ATTACKS[name], wanted.seconds, roles=wanted.roles, stranger=wanted.stranger)
        found.append(figures)
        print(f"{name}: {figures['went']}\n    {'; '.join(harms(figures)) or 'no harm'}", flush=True)  # noqa: T201
        if wanted.json:
            wanted.json.parent.mkdir(parents=True, exist_ok=True)
            wanted.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _write(text: str, into: Path | None) -> None:
    """Print a table, or put it where a document has its place."""
    if into is None:
        print(text)  # noqa: T201
        return
    before, _, rest = into.read_text().partition(_BEGIN)
    into.write_text(before + _BEGIN + "\n\n" + text + "\n" + _END + rest.partition(_END)[2])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks; all unless given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    parser.add_argument("--seconds", type=float, default=10.0, help="for how long one lasts that need not end")
    parser.add_argument(
        "--roles", action="store_true", help="a service with roles, of which the attacker has none"
    )
    parser.add_argument(
        "--stranger",
        action="store_true",
        help="likewise, but the attacker may publish and subscribe to models and consumers of another name",
    )
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="a table of what earlier runs have found"
    )
    parser.add_argument("--into", type=Path, metavar="FILE", help="the document that the table goes into")
    wanted = parser.parse_args()
    if unknown := sorted(set(wanted.names) - ATTACKS.keys()):
        parser.error(f"no attack {unknown[0]!r}; attacks: {', '.join(ATTACKS)}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
