"""What was compiled, on disk: found out where it is damaged, and compiled anew."""

import inspect
import logging
import pickle
from hashlib import blake2b
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile, InTreeCacheLocator

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16


class _Beside(InTreeCacheLocator):  # type: ignore[misc]
    """Beside the source, where that can only be read, say, in an image."""

    def ensure_cache_path(self) -> None:
        """Take it as it is."""


class _WithBeside(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (*CompileResultCacheImpl._locator_classes, _Beside)


class CodeCache(FunctionCache):  # type: ignore[misc]
    """The code of a function, in files of numba's that have digests: damaged machine code would end every process
    that reads it. What is not found where it would be written is also looked for beside the source.
    """

    _impl_class = _WithBeside

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        beside = _Beside(function, inspect.getfile(function)).get_cache_path()
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file, self._beside = (
            _Files(folder, self._impl.filename_base, stamp) for folder in (self._cache_path, beside)
        )

    def _load_overload(self, signature: Any, target: Any) -> Any:
        key = self._index_key(signature, target.codegen())
        code = self._cache_file.load(key) or self._beside.load(key)
        return None if code is None else self._impl.rebuild(target, code)


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """An index, and a file for each key, which is a signature and a type of processor.

    What is not found is compiled and saved, in the place of what could not be used.
    """

    def load(self, key: Any) -> Any:
        """The code of a key, or None."""
        of, code = super().load(key) or (None, None)
        # Where several processes save at once, an index may name a file that has since become another key's.
        return code if of == key else None

    def save(self, key: Any, data: Any) -> None:
        """Save the code of a key."""
        super().save(key, (key, data))

    def _load_index(self) -> dict[Any, str]:
        try:
            index: dict[Any, str] = super()._load_index()
        except OSError:
            raise
        except Exception:  # noqa: BLE001  # whatever comes of unpickling what is damaged
            _say_damaged(self._index_path)
            return {}
        return index

    def _load_data(self, name: str) -> Any:
        path = self._data_path(name)
        kept = Path(path).read_bytes()
        pickled = kept[_DIGEST_BYTES:]
        if kept[:_DIGEST_BYTES] != _digest(pickled):
            _say_damaged(path)
            return None
        return pickle.loads(pickled)  # noqa: S301  # whoever can write here can run code in this process anyway

    def _save_data(self, name: str, data: Any) -> None:
        pickled = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(_digest(pickled) + pickled)


def _digest(pickled: bytes) -> bytes:
    return blake2b(pickled, digest_size=_DIGEST_BYTES).digest()


def _say_damaged(path: str) -> None:
    logger.warning("%s is damaged: what was in it is compiled again", path)
