"""How the processes of a soak tell each other things: by files and signals."""

import signal
import threading
from pathlib import Path


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
