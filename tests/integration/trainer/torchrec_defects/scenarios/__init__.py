"""The scenarios, each for a row of the table of defects in TorchRec's tracker, `README.md`."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules

from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios(__name__)


def scenario(row: int, *, ranks: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What must hold where TorchRec's tracker has the defect of this row; on a number of ranks."""
    return SCENARIOS.scenario(f"row{row:02}", ranks=ranks)


for _module in iter_modules(__path__):  # Which register theirs.
    import_module(f"{__name__}.{_module.name}")
