"""Bits that flip in the memory of a process, as broken memory would do it."""


def flip_in_memory(pid: int, content: bytes) -> int:
    """Flip one bit of the first byte of each copy of some bytes that a process has in memory; of how many.

    Files that it has mapped are left alone, but for those that have no name any more.

    Raises:
        PermissionError: the memory of this process cannot be written from here.
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
