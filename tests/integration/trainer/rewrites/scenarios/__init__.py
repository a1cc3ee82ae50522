"""The scenarios of rows that change in other ways than by the lookups found at first, and of deletes."""

from importlib import import_module
from pkgutil import iter_modules

from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios(__name__, one_by_day=True)

for _module in iter_modules(__path__):  # Which register theirs.
    import_module(f"{__name__}.{_module.name}")
