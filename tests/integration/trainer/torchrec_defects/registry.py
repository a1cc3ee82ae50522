"""The scenarios, each for a row of the table of defects in TorchRec's tracker, `README.md`."""

from collections.abc import Callable

from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios("tests.integration.trainer.torchrec_defects.scenarios")


def scenario(row: int, *, ranks: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """What must hold where TorchRec's tracker has the defect of this row; on so many ranks."""
    return SCENARIOS.scenario(f"row{row:02}", ranks=ranks)
