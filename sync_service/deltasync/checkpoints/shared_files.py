"""Which checkpoints use which files, so that the bytes of a checkpoint alone are known without reading others."""

from collections.abc import Iterable

from deltasync.checkpoints.manifest import File


class SharedFiles:
    """The files of checkpoints. A change costs as much as the files of one checkpoint. Not for several threads."""

    def __init__(self) -> None:
        self._files = dict[str, list[File]]()  # By the checkpoint's id.
        self._users = dict[str, list[str]]()  # Ids of checkpoints, by the file's name.
        self._own = dict[str, int]()

    def __contains__(self, id: str) -> bool:  # noqa: A002
        return id in self._files

    def uses(self, name: str) -> bool:
        """Whether a checkpoint uses a file."""
        return name in self._users

    def own_bytes(self, id: str) -> int | None:  # noqa: A002
        """Bytes of the files that only this checkpoint uses; None if its files are unknown."""
        return self._own.get(id)

    def set(self, id: str, files: Iterable[File]) -> None:  # noqa: A002
        """Add a checkpoint, or replace its files."""
        self.remove(id)
        self._files[id], self._own[id] = list(files), 0
        for each in self._files[id]:
            users = self._users.setdefault(each.name, [])
            if len(users) == 1:
                self._own[users[0]] -= each.bytes
            users.append(id)
            if len(users) == 1:
                self._own[id] += each.bytes

    def remove(self, id: str) -> None:  # noqa: A002
        """Remove a checkpoint, if it is there."""
        for each in self._files.pop(id, ()):
            users = self._users[each.name]
            users.remove(id)
            if len(users) == 1:
                self._own[users[0]] += each.bytes
            elif not users:
                del self._users[each.name]
        self._own.pop(id, None)
