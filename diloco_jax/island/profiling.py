"""Trace the next steps of this process with jax.profiler.

Host 0 alone does it: its devices run the same program as all others, and where it waits
for another host its trace shows the collective that waits. The train loop takes no part
in it: a thread of its own begins, counts the steps that the loop posts, and ends.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import jax

from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.messages import ProfileRequest

logger = logging.getLogger(__name__)

IN_FLIGHT = 1
"""Steps that are dispatched, and perhaps not done, when the loop posts one."""


class Profiler:
    """Traces of one incarnation, on threads that no one waits for."""

    def __init__(self, mailbox: Mailbox, name: str, folder: Path) -> None:
        """folder: gets a folder NAME-STEP for each trace."""
        self._mailbox, self._name, self._folder = mailbox, name, folder

    def ask(self, request: ProfileRequest) -> None:
        """Trace; returns at once. A second one at the same time fails. The log says
        where the trace is, or why there is none."""
        threading.Thread(
            target=self._run, args=(request,), name="profile", daemon=True
        ).start()

    def _run(self, request: ProfileRequest) -> None:
        try:
            folder = self._traced(request)
        except Exception as error:
            # Whatever it is, it is told; the island trains on.
            logger.warning(
                "no trace of %d steps: %s: %s",
                request.steps,
                type(error).__name__,
                error,
            )
        else:
            logger.info(
                "the trace of %d steps is in %s; `tensorboard --logdir` of it shows "
                "them (pip install xprof)",
                request.steps,
                folder,
            )

    def _traced(self, request: ProfileRequest) -> Path:
        """Return the folder of the trace, which is named after the steps made before
        it."""
        options = jax.profiler.ProfileOptions()
        # Python's own tracer would slow down every thread, the loop's first of all.
        options.python_tracer_level = 0
        until = time.monotonic() + request.within_s
        begun = self._mailbox.status().steps
        folder = (self._folder / f"{self._name}-{begun}").absolute()
        # A trace that cannot be written leaves jax with a profiler that has begun.
        folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            first = self._passed(begun + 1, until)
            self._passed(first + request.steps + IN_FLIGHT, until)
        finally:
            jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        return folder

    def _passed(self, step: int, until: float) -> int:
        """Wait until that many steps are made; return how many are."""
        self._mailbox.wait_for_post(
            lambda status, _: status.steps >= step, until - time.monotonic()
        )
        made = self._mailbox.status().steps
        if made < step:
            if self._mailbox.ending is not None:
                raise RuntimeError("the island ends")
            raise TimeoutError(
                f"the island was at step {made} when the time for the trace was over, "
                f"and has to come to step {step}"
            )
        return made
