"""The processes of a soak: started, watched, and started again when they were killed, as a cluster would."""

import logging
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deltasync.trainer.example.processes import Processes

logger = logging.getLogger(__name__)

_DEADLINE_SECONDS = 180.0
_POLL_SECONDS = 0.05
_MOST_TROUBLES = 50


def _high_water_bytes(pid: int) -> int:
    """The most that a process has held of memory; 0 where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


class Crew:
    """Processes by name. Threads of several faults use it."""

    def __init__(self, processes: Processes) -> None:
        self.folder = processes.folder
        self.starts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self.memory: dict[str, int] = {}
        self._processes = processes
        self._commands: dict[str, list[str]] = {}  # Of those that are to run.
        self._teams: dict[str, Callable[[], None]] = {}
        self._lock = threading.RLock()
        self._closed = False
        self._restarting: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process, which is started again when it is killed."""
        with self._lock:
            self._commands[name] = list(command)
            self._start(name)

    def start_team(self, prefix: str, start: Callable[[], None]) -> None:
        """Have `start` start processes whose names begin so, and do so again when one was killed: without it the
        others end, or wait for ever.
        """
        with self._lock:
            self._teams[prefix] = start
            start()

    def names(self, prefix: str = "") -> list[str]:
        """Those that are to run."""
        with self._lock:
            return sorted(name for name in self._commands if name.startswith(prefix))

    def pid(self, name: str) -> int:
        return self._processes.pid(name)

    def runs(self, name: str) -> bool:
        """Whether a process is to run, and does."""
        with self._lock:
            return name in self._commands and self._processes.status(name) is None

    def send(self, name: str, number: signal.Signals) -> None:
        with self._lock:
            if name in self.starts and self._processes.status(name) is None:
                os.kill(self.pid(name), number)

    def kill(self, names: Iterable[str]) -> None:
        """Kill some processes at once. They are started again."""
        with self._lock:  # Not before the last of them is dead.
            for name in names:
                self.send(name, signal.SIGKILL)

    def dismiss(self, names: Iterable[str], number: signal.Signals = signal.SIGTERM) -> None:
        """End processes, which are not started again, and wait until they have ended."""
        leaving = list(names)
        with self._lock:
            for name in leaving:
                self._commands.pop(name, None)
                self.send(name, signal.SIGCONT)
                self.send(name, number)
        for name in leaving:
            self.wait(name)

    def restart(
        self,
        name: str,
        number: signal.Signals = signal.SIGTERM,
        between: Callable[[], object] = lambda: None,
        command: Sequence[str] = (),
    ) -> None:
        """End a process with a signal, do what is to be done while it is away, and start it again, perhaps with
        another command.
        """
        with self._lock:
            restarting = self._restarting[name]
        with restarting:
            command = command or self._commands[name]
            self.dismiss([name], number)
            try:
                between()
            finally:
                self.start(name, command)

    def wait(self, name: str, seconds: float = _DEADLINE_SECONDS) -> None:
        """Wait until a process has ended, whose status should be 0; one that does not is killed."""
        deadline = time.monotonic() + seconds
        while (status := self._processes.status(name)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if status is None:
            self.trouble(f"{name} did not end within {seconds:.0f} s")
            self._kill(name)
        elif status not in (0, -signal.SIGKILL, -signal.SIGTERM):  # The last where it had just begun.
            self._ended_by_itself(name, status)

    def run(self, name: str, command: Sequence[str]) -> int:
        """Run a process to its end, whatever that is; its status."""
        with self._lock:
            self._processes.start(name, list(command))
        while (status := self._processes.status(name)) is None:
            time.sleep(_POLL_SECONDS)
        return status

    def thaw(self) -> None:
        """Let everything go on that is frozen."""
        for name in self.names():
            self.send(name, signal.SIGCONT)

    def supervise(self) -> None:
        """Look at every process once, and start those again that were killed."""
        with self._lock:
            for prefix in self._teams:
                self._supervise_team(prefix)
            for name in self.names():
                pid, status = self.pid(name), self._processes.status(name)
                self.memory[name] = max(self.memory.get(name, 0), _high_water_bytes(pid))
                if status == 0:
                    self._commands.pop(name)
                # A rank that ended since its team was looked at waits for the next look, which starts all of them.
                elif status is not None and not name.startswith(tuple(self._teams)):
                    if status != -signal.SIGKILL:
                        self._ended_by_itself(name, status)
                    self._start(name)

    def _supervise_team(self, prefix: str) -> None:
        names = self.names(prefix)
        status = {name: self._processes.status(name) for name in names}
        if not any(status.values()):
            return
        if -signal.SIGKILL not in status.values():
            for name in names:
                if found := status[name]:
                    self._ended_by_itself(name, found)
        for name in names:
            self._kill(name)
        self._teams[prefix]()

    def _kill(self, name: str) -> None:
        """Kill a process, if it still runs, and wait until it is gone."""
        while self._processes.status(name) is None:
            os.kill(self.pid(name), signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def trouble(self, what: str) -> None:
        if len(self.troubles) < _MOST_TROUBLES:
            self.troubles.append(what)
            logger.warning("trouble: %s", what)

    def close(self) -> None:
        """Let everything go on that is frozen, and start nothing any more: faults may still be under way."""
        with self._lock:
            self._closed = True
        self.thaw()

    def _start(self, name: str) -> None:
        if self._closed:
            return
        self.starts[name] += 1
        self._processes.start(name, self._commands[name])

    def _ended_by_itself(self, name: str, status: int) -> None:
        last = self._processes.tail(name).splitlines()[-1:]
        self.trouble(f"{name} ended with status {status}: {' '.join(last)}")
