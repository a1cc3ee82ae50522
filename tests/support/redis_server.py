"""A real Redis or Valkey server in a folder, which a test may kill and restart."""

import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.support.waiting import wait_for

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A server on a socket in a folder, without persistence."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.socket = str(folder / "redis.sock")
        self._folder, self._settings = folder, settings

    def start(self) -> None:
        assert PROGRAM
        Path(self.socket).unlink(missing_ok=True)
        command = [PROGRAM, "--port", "0", "--unixsocket", self.socket, "--dir", str(self._folder)]
        command += ["--save", "", "--loglevel", "warning", *self._settings]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "the server did not listen in time")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def client(self, **settings: Any) -> "redis.Redis":
        return redis.Redis(unix_socket_path=self.socket, retry=Retry(NoBackoff(), 0), **settings)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended before it listened"
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
