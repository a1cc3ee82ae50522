"""How the processes of a soak tell each other things, and what they write down: files that a kill leaves whole."""

import json
import signal
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def replace_file(path: Path, text: str) -> None:
    """Write a file, which others see as it was or as it is."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def stop_on_signals() -> threading.Event:
    """An event that is set when this process is asked to end."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


class Journal:
    def __init__(self, file: Path) -> None:
        cut_half_line(file)
        self._file = file.open("a")

    def append(self, **facts: Any) -> None:
        """Write a line down. It outlives the process from here on."""
        self._file.write(json.dumps(facts) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_journal(file: Path) -> list[Mapping[str, Any]]:
    """The whole lines of a journal, oldest first; none where there is none."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def of_pasts(lines: Sequence[Mapping[str, Any]], put_back_unix_ns: Sequence[int]) -> list[Mapping[str, Any]]:
    """The same lines, whose histories have other names after each of these times: what came before is no more, and
    the service calls its history as ever.
    """
    numbers = [bisect_right(put_back_unix_ns, line["unix_ns"]) for line in lines]
    return [
        {**line, "history": f"{line['history']}/{number}"} for number, line in zip(numbers, lines, strict=True)
    ]


def cut_half_line(file: Path) -> None:
    if file.exists():
        text = file.read_bytes()
        if not text.endswith(b"\n"):
            file.write_bytes(text[: text.rfind(b"\n") + 1])
