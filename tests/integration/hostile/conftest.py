"""A service that is attacked by all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.besieged import Besieged
from tests.support.volumes import small_volume

# Nothing that a stranger says may take more.
_VOLUME_BYTES = 256 << 20


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    """The service, on a small volume, with what arguments the file has."""
    arguments = getattr(request.module, "ARGUMENTS", ())
    folder: Path = tmp_path_factory.mktemp("besieged")
    with small_volume(_VOLUME_BYTES) as volume, Besieged(volume, folder / "service.log", *arguments) as besieged:
        yield besieged


@pytest.fixture
def unharmed(service: Besieged) -> Iterator[None]:
    """After a test the honest go on, and nothing is left of the attack."""
    with service.unharmed():
        yield
