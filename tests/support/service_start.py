"""The modules that every service imports and compiles at start."""

import deltasync.api.process
import deltasync.cli.serve  # noqa: F401
from deltasync.kernels.compiled import warm

warm()
