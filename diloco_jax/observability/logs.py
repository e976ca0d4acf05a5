"""One format for the logs of all processes."""

from __future__ import annotations

import logging
import sys
import time


def setup_logging(level: str = "INFO") -> None:
    """Send the package's log to standard error, times in UTC; others' from WARNING on.

    Calling it again replaces what it did before.
    """
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("diloco_jax").setLevel(level)
