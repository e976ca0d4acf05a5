"""Programs that an island compiles while it trains already.

Its first steps need half of its programs, and wait for no others. What the loop
needs before it is compiled here, the loop compiles itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import jax

from diloco_jax.machine import give_memory_back

logger = logging.getLogger(__name__)


class Later:
    """Compiles programs in a thread of its own."""

    def __init__(self, lowered: Iterable[jax.stages.Lowered]) -> None:
        """lowered: made and compiled one by one; they stay compiled for their first
        execution."""
        self._lowered = lowered
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._compile, name="compile-later", daemon=True
        )
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End it, after the program at which it is; wait for that no longer."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _compile(self) -> None:
        try:
            for program in self._lowered:
                if self._closed.is_set():
                    return
                program.compile()
        except Exception as error:  # The loop meets it where it needs the program.
            logger.warning("a program that may be needed does not compile: %s", error)
        give_memory_back()
