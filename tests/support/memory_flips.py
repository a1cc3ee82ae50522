"""Flips bits in the memory of a process, like broken memory."""


def flip_in_memory(pid: int, content: bytes) -> int:
    """Flip one bit of the first byte of each copy of these bytes in a process's memory.

    Returns the number of copies. Leaves mapped files alone, except deleted files.

    Raises:
        PermissionError: this process may not write to that memory.
        ProcessLookupError, FileNotFoundError: there is no such process.
    """
    flipped = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, rights, *_, name = f"{line.rstrip()} ".split(" ", 5)
            of_file = name.strip().startswith("/") and not name.strip().endswith("(deleted)")
            if not rights.startswith("rw") or of_file:
                continue
            first, end = (int(each, 16) for each in span.split("-"))
            try:
                memory.seek(first)
                found = memory.read(end - first)
            except OSError:  # Some of the system's own mappings cannot be read.
                continue
            at = found.find(content)
            while at >= 0:
                memory.seek(first + at)
                memory.write(bytes([content[0] ^ 16]))
                flipped += 1
                at = found.find(content, at + 1)
    return flipped
