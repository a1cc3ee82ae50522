"""What every service imports and compiles when it starts."""

import deltasync.api.process
import deltasync.cli.serve  # noqa: F401
from deltasync.kernels.compiled import warm

warm()
