"""Notice that a host's machine is short of memory or disk, and say so; keep no memory
that is not used.

The log says how much is left; the island's reports say what is short, so that people
hear of it who do not read its log. Host 0 hears of the others as they answer it.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from diloco_jax import machine
from diloco_jax.protocol.messages import Short

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""
LITTLE_LEFT = 0.03
"""Share of the machine's memory below which little is left."""
GIVE_BACK_LOOKS = 10
"""Looks from one `memory.give_back` to the next, at most. Arrays of takes and adoptions
come from a step's temporary memory and leave holes in it: a CPU island of 87 M
parameters grew by 0.6 GB within a cycle. Each time takes some tens of milliseconds of
this thread."""
GROWN = 1.005
"""Growth of this process's peak memory at which the next one comes at once. In a run's
first cycle each take leaves a residual between holes: with ten looks to the next one,
the peak was up to 9 % above what an island needs."""


class ShortageWatch:
    """Looks again and again, on a thread of its own: a disk that hangs holds up no
    other watch. It ends with the block."""

    def __init__(
        self, folders: Sequence[Path], tell: Callable[[tuple[Short, ...]], None]
    ) -> None:
        """folders: those that this process writes to. tell: called with what is short
        when that changes."""
        self._folders, self._tell = folders, tell
        self._short: dict[Short, str] = {}
        self._looks, self._peak = 0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shortage", daemon=True)

    def __enter__(self) -> ShortageWatch:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()

    def look(self) -> None:
        """Look once; tell, and log what has become short."""
        self._give_back()
        short = dict(self._found())
        new = short.keys() - self._short.keys()
        for what in sorted(new):
            logger.warning("%s", short[what])
        if short.keys() != self._short.keys():
            self._tell(tuple(sorted(short)))
        self._short = short

    def _give_back(self) -> None:
        """Return freed memory to the system, if it is time for it."""
        self._looks += 1
        peak = machine.peak_bytes()
        if self._looks >= GIVE_BACK_LOOKS or peak > GROWN * self._peak:
            self._looks, self._peak = 0, peak
            machine.give_memory_back()

    def _found(self) -> Iterator[tuple[Short, str]]:
        left, whole = machine.left_bytes()
        if whole and left < LITTLE_LEFT * whole:
            if "memory" not in self._short:
                machine.give_memory_back()
            yield (
                "memory",
                f"{left / 1e9:.1f} of {whole / 1e9:.1f} GB of memory are left on this "
                f"machine, and this process has {machine.resident_bytes() / 1e9:.1f}: "
                f"it may be killed for it",
            )
        for folder in self._folders:
            made = next(f for f in (folder, *folder.absolute().parents) if f.exists())
            free = shutil.disk_usage(made).free
            if free < machine.LITTLE_DISK_BYTES:
                yield (
                    "disk",
                    f"{free / 1e6:.0f} MB are free in {folder}: checkpoints and the "
                    f"log fail once it is full; free some space there",
                )

    def _run(self) -> None:
        told = False
        while not self._ended.wait(LOOK_S):
            try:
                self.look()
                told = False
            except OSError as error:  # A folder elsewhere may be away for a while.
                if not told:
                    logger.warning("cannot look for space: %s", error)
                told = True
