"""Trace the next steps of this process with jax.profiler, and send the trace.

Host 0 alone does it: its devices run the same program as all others, and where it waits
for another host its trace shows the collective that waits. The train loop takes no part
in it: a thread of its own begins, counts the steps that the loop posts, ends and sends.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
from msgspec.structs import replace

from diloco_jax.deadlines import Backoff, Deadlines
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.messages import MAX_TEXT, ProfileRequest
from diloco_jax.wire.bulk import PROFILE_BLOCK_BYTES, Identity, ProfilePart
from diloco_jax.wire.errors import Busy, ConnectionLost, WireError
from diloco_jax.wire.profiling import ENDING

logger = logging.getLogger(__name__)

IN_FLIGHT = 1
"""Steps that are dispatched, and perhaps not done, when the loop posts one."""


class Profiler:
    """Traces of one incarnation, on threads that no one waits for."""

    def __init__(
        self,
        mailbox: Mailbox,
        identity: Identity,
        send: Callable[[ProfilePart, memoryview], int],
        deadlines: Deadlines,
    ) -> None:
        """send: sends a block, as `Transfers.send_block`."""
        self._mailbox, self._identity = mailbox, identity
        self._send, self._deadlines = send, deadlines

    def ask(self, request: ProfileRequest) -> None:
        """Trace and send; returns at once. A second one at the same time fails, and
        says so."""
        threading.Thread(
            target=self._run, args=(request,), name="profile", daemon=True
        ).start()

    def _run(self, request: ProfileRequest) -> None:
        part = ProfilePart(number=request.number, **self._identity.fields())
        try:
            try:
                step, trace = self._traced(request)
            except Exception as error:
                # Whatever it is, it is told; the island trains on.
                logger.warning("no trace: %s", error)
                text = f"{type(error).__name__}: {error}"[:MAX_TEXT]
                self._deliver(replace(part, failed=text), memoryview(b""))
                return
            part = replace(part, step=step, total=len(trace))
            for offset in range(0, len(trace), PROFILE_BLOCK_BYTES):
                block = trace[offset : offset + PROFILE_BLOCK_BYTES]
                self._deliver(replace(part, offset=offset, length=len(block)), block)
        except WireError as error:
            logger.warning("the trace was not sent: %s", error)

    def _traced(self, request: ProfileRequest) -> tuple[int, memoryview]:
        """Return the first whole step that is traced, and the trace."""
        options = jax.profiler.ProfileOptions()
        # Python's own tracer would slow down every thread, the loop's first of all.
        options.python_tracer_level = 0
        until = time.monotonic() + request.within_s
        with tempfile.TemporaryDirectory(prefix="diloco-profile-") as folder:
            jax.profiler.start_trace(folder, profiler_options=options)
            try:
                first = self._passed(self._mailbox.status().steps + 1, until)
                self._passed(first + request.steps + IN_FLIGHT, until)
            finally:
                jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
            (file,) = Path(folder).rglob(f"*{ENDING}")
            nbytes = file.stat().st_size
            if nbytes > request.max_bytes:
                raise ValueError(
                    f"the trace of {request.steps} steps has {nbytes:,} bytes, and at "
                    f"most {request.max_bytes:,} are sent; ask for fewer --steps"
                )
            return first, memoryview(file.read_bytes())

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

    def _deliver(self, part: ProfilePart, block: memoryview) -> None:
        """Send a block; try again where the coordinator is away for a while."""
        backoff = Backoff(self._deadlines)
        until = time.monotonic() + self._deadlines.pin_s
        while True:
            try:
                self._send(part, block)
                return
            except (ConnectionLost, Busy):
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > until:
                    raise
                if self._mailbox.ending is not None:
                    raise
                time.sleep(pause_s)
