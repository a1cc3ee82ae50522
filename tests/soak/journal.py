"""What a process writes down before it goes on, in lines of JSON: a kill leaves all whole, but for the last."""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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
