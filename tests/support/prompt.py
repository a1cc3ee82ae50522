"""An interactive Python prompt, into which a test pastes code."""

import subprocess
import sys
from pathlib import Path
from typing import Self

_END = "pasted to here"


class PythonPrompt:
    """An interactive Python in a folder, with its errors in the terminal output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._errors = folder / "prompt.stderr"

    def __enter__(self) -> Self:
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-iqu"],
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def paste(self, code: str) -> str:
        """Paste code and an empty line; returns what it prints. Fails on a Python error."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(f"{code}\nprint({_END!r})\n")
        stdin.flush()
        lines = iter(stdout.readline, "")
        printed = "".join(line for line in iter(lambda: next(lines, f"{_END}\n"), f"{_END}\n"))
        errors = self._errors.read_text()
        assert "Error" not in errors, errors
        return printed
