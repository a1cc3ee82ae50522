"""Logging of our own processes."""

import logging


def log_to_stderr() -> None:
    """Log what our packages have to say, and of the others only warnings."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for package in ("sync_service", "trainer"):
        logging.getLogger(package).setLevel(logging.INFO)
