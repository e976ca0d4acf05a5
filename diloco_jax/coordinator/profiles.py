"""The traces that an operator asks islands for: `profiles/ISLAND-STEP` of the workdir.

One island is traced at a time. A trace comes as bulk in blocks, one after the other,
each in memory of its own until it is on disk. The folder gets its name when all of it
is there. What is bounded: a block, a trace, the traces that are kept, and the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_jax import run_files, storage
from diloco_jax.config import Placement
from diloco_jax.coordinator.holding.publishes import require_space
from diloco_jax.coordinator.kept import mapped
from diloco_jax.protocol.coordinator import profiling
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.messages import FromCoordinator, ProfileOrder, ProfileRequest
from diloco_jax.wire.bulk import PROFILE_BLOCK_BYTES, ProfilePart
from diloco_jax.wire.errors import Busy, Refused, RemoteProtocolError
from diloco_jax.wire.profiling import ENDING

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 20
"""Most bytes of a trace."""
MOST_KEPT = 16
"""Newest traces that stay in the workdir, and orders whose end is remembered."""
TEMPORARY = ".tmp"


@dataclasses.dataclass(kw_only=True)
class _Asked:
    """The trace that is under way."""

    number: int
    island: str
    incarnation: int
    until: float
    """Time of the monotonic clock by which its next block must come."""
    got: int = 0
    total: int = 0
    step: int = 0


class Profiles:
    """The traces of one run. Any thread may call the methods; none of them is the
    lead's."""

    def __init__(
        self,
        workdir: Path,
        tell: Callable[[str, FromCoordinator], None],
        *,
        budget_s: float,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        tell: sends a message to a session.
        budget_s: the time budget.
        patience_s: longest time from the traced steps to the first block, and from one
          block to the next.
        """
        self._folder = workdir / run_files.PROFILES
        self._tell, self._clock = tell, clock
        self._budget_s, self._patience_s = budget_s, patience_s
        # Not from 1: an order of an earlier life of the coordinator is not known here.
        self._numbers = itertools.count(int(time.time()))
        self._lock = threading.Lock()
        self._asked: _Asked | None = None
        self._ended: dict[int, dict[str, Any]] = {}
        for torn in self._folder.glob(f"*{TEMPORARY}"):
            shutil.rmtree(torn, ignore_errors=True)

    @classmethod
    def of_run(
        cls,
        placement: Placement,
        workdir: Path,
        tell: Callable[[str, FromCoordinator], None],
    ) -> Profiles:
        """Make those of a run, with its time budgets."""
        return cls(
            workdir,
            tell,
            budget_s=placement.time_budget_s,
            patience_s=placement.outage_budget_s,
        )

    def order(self, order: ProfileOrder, state: State) -> dict[str, Any]:
        """Carry out an operator's order; see `Client.profile`."""
        with self._lock:
            self._give_up(state)
            if order.number:
                return self._told(order.number)
            if wrong := profiling.refusal(state, order):
                raise Refused("profile", wrong)
            if self._asked is not None:
                raise Busy(
                    f"island {self._asked.island!r} is being traced, and one is at a "
                    f"time; come again when that is done"
                )
            island = state.islands[order.island]
            within_s = profiling.within_s(state, order, self._budget_s)
            self._asked = _Asked(
                number=next(self._numbers),
                island=island.name,
                incarnation=island.incarnation,
                until=self._clock() + within_s + self._patience_s,
            )
            number = self._asked.number
        logger.info("an operator: trace %d steps of %s", order.steps, island.name)
        request = ProfileRequest(
            number=number,
            steps=order.steps,
            within_s=within_s,
            max_bytes=MOST_BYTES,
        )
        self._tell(island.session, request)
        return {"number": number, "phase": "tracing"}

    def begin(self, part: ProfilePart) -> memoryview:
        """Return memory for a block; it may come again.

        Raises Refused for a trace that was not asked for, or is too large.
        """
        with self._lock:
            asked = self._of(part)
            if part.total > MOST_BYTES or part.length > PROFILE_BLOCK_BYTES:
                raise Refused(
                    "profile",
                    f"a block of {part.length} bytes of a trace of {part.total}: a "
                    f"trace has {MOST_BYTES} bytes at most, in blocks of "
                    f"{PROFILE_BLOCK_BYTES}; ask for fewer --steps",
                )
            if part.offset > asked.got or (part.total != asked.total and asked.got):
                raise RemoteProtocolError(
                    f"bytes from {part.offset} of a trace of {part.total} came after "
                    f"{asked.got} of {asked.total}; blocks come in their order"
                )
        return memoryview(bytearray(part.length))

    def end(self, part: ProfilePart, place: memoryview) -> bool:
        """Write a block; the last one gives the folder its name. Return True then."""
        with self._lock:
            asked = self._of(part)
            if part.failed:
                self._end(asked, phase="failed", text=part.failed)
                return True
            if part.offset != asked.got:
                return False  # It came before, and its answer was lost.
            asked.step, asked.total = part.step, part.total
            try:
                self._write(asked, place)
            except OSError as error:
                text = f"the trace cannot be written to {self._folder}: {error}"
                self._end(asked, phase="failed", text=text)
                raise Refused("profile", text) from error
            asked.until = self._clock() + self._patience_s
            return self._asked is None

    def stored(self, number: int) -> memoryview:
        """Return the bytes of a trace, where they lie. Raises Refused if there is
        none."""
        with self._lock:
            told = self._ended.get(number, {"phase": "unknown"})
            if told["phase"] == "done":
                with contextlib.suppress(FileNotFoundError, StopIteration):
                    return mapped(next(Path(told["folder"]).rglob(f"*{ENDING}")))
        raise Refused(
            "profile",
            f"trace {number} is not stored (any more); the newest {MOST_KEPT} are, "
            f"until the coordinator is started again",
        )

    def _of(self, part: ProfilePart) -> _Asked:
        """Return the trace that a block belongs to; raise Refused if it is of none."""
        asked = self._asked
        wanted = asked and (asked.number, asked.island, asked.incarnation)
        if asked is None or wanted != (part.number, part.island, part.incarnation):
            raise Refused(
                "profile",
                f"trace {part.number} of island {part.island!r} is not waited for (any "
                f"more)",
            )
        return asked

    def _write(self, asked: _Asked, block: memoryview) -> None:
        name = f"{asked.island}-{asked.step}"
        scratch = self._folder / f"{name}{TEMPORARY}"
        path = scratch / place_of(name, asked.island)
        if not asked.got:
            shutil.rmtree(scratch, ignore_errors=True)
            path.parent.mkdir(parents=True)
            require_space(scratch, asked.total)
        with path.open("ab") as file:
            file.write(block)
            asked.got += len(block)
            if asked.got < asked.total:
                return
            file.flush()
            os.fsync(file.fileno())
        final = self._folder / name
        if final.exists():  # Of an earlier incarnation.
            shutil.rmtree(final)
        scratch.rename(final)
        storage.sync_path(self._folder)
        kept = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in kept[:-MOST_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        told = {"folder": str(final.absolute()), "bytes": asked.total}
        self._end(asked, phase="done", step=asked.step, **told)

    def _give_up(self, state: State) -> None:
        """End a trace that will not come."""
        asked = self._asked
        if asked is None:
            return
        island = state.islands.get(asked.island)
        if island is None or island.incarnation != asked.incarnation:
            text = f"island {asked.island!r} ended before its trace had come"
        elif island.status == "gone":
            text = f"island {asked.island!r} left before its trace had come"
        elif self._clock() > asked.until:
            text = (
                f"island {asked.island!r} sent {asked.got} bytes of its trace, and "
                f"then nothing in time; see its log"
            )
        else:
            return
        self._end(asked, phase="failed", text=text)

    def _end(self, asked: _Asked, **told: Any) -> None:
        self._asked = None
        if told["phase"] == "failed":
            scratch = self._folder / f"{asked.island}-{asked.step}{TEMPORARY}"
            with contextlib.suppress(OSError):
                shutil.rmtree(scratch)
        logger.info("the trace of island %s: %s", asked.island, told)
        self._ended[asked.number] = {"number": asked.number, **told}
        while len(self._ended) > MOST_KEPT:
            del self._ended[min(self._ended)]

    def _told(self, number: int) -> dict[str, Any]:
        asked = self._asked
        if asked is not None and asked.number == number:
            if not asked.total:
                return {"number": number, "phase": "tracing"}
            share = asked.got / asked.total
            return {"number": number, "phase": "sending", "share": share}
        if number not in self._ended:
            raise Refused(
                "profile",
                f"no trace {number} is known: the coordinator was started again "
                f"meanwhile; ask for another one",
            )
        return self._ended[number]


def place_of(run: str, host: str) -> Path:
    """Return where TensorBoard and xprof look for a trace in the folder that they are
    given, below its runs and hosts."""
    return Path("plugins") / "profile" / run / f"{host}{ENDING}"
