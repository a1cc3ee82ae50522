"""What processes have logged that they should not have."""

import re
from pathlib import Path

from tests.soak.fleet import CLICKS

_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(.*)", re.MULTILINE)


def tracebacks(folder: Path) -> list[str]:
    """The errors that were logged with a traceback: file, and the traceback's last line.

    Those of TorchRec's ranks are left out: one that loses another has no other way to end.
    """
    files = (file for file in sorted(folder.glob("*.log")) if not file.name.startswith(f"{CLICKS}-rank"))
    return [
        f"{file.name}: {last}" for file in files for last in _TRACEBACK.findall(file.read_text(errors="replace"))
    ]
