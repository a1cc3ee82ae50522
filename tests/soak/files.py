"""Files by which the processes of a soak tell each other things."""

from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write a file, which others see as it was or as it is."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
