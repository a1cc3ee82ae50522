"""Looks up the known vulnerabilities of what locks name.

python locks/audit.py requirements.lock

What `make audit` runs. Ends with 1 if there are any. Where the index gives no data on vulnerabilities it says so,
and ends with 0: that is no finding.
"""

import json
import subprocess
import sys
from typing import Any

AUDIT = [sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--format", "json"]


def main(locks: list[str]) -> int:
    """Print what is known of the packages; 1 if one is vulnerable."""
    packages: dict[tuple[str, str], dict[str, Any]] = {}
    for lock in locks:
        done = subprocess.run([*AUDIT, "--requirement", lock], capture_output=True, text=True)
        try:
            found = json.loads(done.stdout)["dependencies"]
        except ValueError:
            print(f"{lock}: not audited: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
            continue
        packages |= {(each["name"], each.get("version", "")): each for each in found}
    return report(list(packages.values()))


def report(packages: list[dict[str, Any]]) -> int:
    """Print what pip-audit knows of packages; 1 if one is vulnerable."""
    known = [each for each in packages if "skip_reason" not in each]
    vulnerable = [each for each in known if each["vulns"]]
    for each in vulnerable:
        for one in each["vulns"]:
            mended = ", ".join(one["fix_versions"]) or "no version yet"
            print(f"{each['name']} {each['version']}: {one['id']}, mended in {mended}")
    if known:
        print(f"{len(known)} of {len(packages)} packages audited, {len(vulnerable)} vulnerable")
    else:
        print("Nothing was audited: the data on vulnerabilities of the package index cannot be reached from here")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
