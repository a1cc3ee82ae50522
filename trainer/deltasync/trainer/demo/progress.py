"""The demo's progress: a bar on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deltasync.core.words import counted

_LINES = 10
_WAIT_LINE_SECONDS = 2.0


class DemoProgress:
    """Shows steps, versions and lag while the demo runs."""

    def __init__(self, console: Console, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._steps = steps
        self._printed = 0
        self._next_wait_line = 0.0
        self._bar = Progress(
            TextColumn("steps"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}  {task.description}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps)

    def show(self, lag: dict[str, Any]) -> None:
        """Show the service's answer for the consumer."""
        step, behind = lag["head_step"], lag["lag"]
        lacking = f"{counted(behind['versions'], 'version')}, {counted(behind['rows'], 'row')}"
        distance = f"{lacking}, {behind['seconds']:.1f} s"
        share = behind["unsent_share"]
        unsent = f", {100 * share:.1f} % of the norm unsent" if share else ""
        text = f"version {lag['head']}  lag {distance}{unsent}"
        self._bar.update(self._task, completed=step, description=text)
        part = step * _LINES // self._steps
        if not self._console.is_terminal and part > self._printed:
            self._printed = part
            self._console.print(f"step {step}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    def show_wait(self, lag: dict[str, Any]) -> None:
        """Show what the replicas still lack, after the last step; nothing if they lack nothing."""
        behind = lag["lag"]
        if not behind["rows"] and not behind["versions"]:
            return
        rows = "row" if behind["rows"] == 1 else "rows"
        text = f"draining: {behind['rows']:,} {rows} left, {counted(behind['versions'], 'version')}"
        self._bar.update(self._task, completed=self._steps, description=text)
        if not self._console.is_terminal and self._clock() >= self._next_wait_line:
            self._next_wait_line = self._clock() + _WAIT_LINE_SECONDS
            self.say(f"  {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._bar.stop()
