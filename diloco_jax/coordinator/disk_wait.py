"""Repeat writes while a disk is full, or the process has no file left to open.

Islands train on while the coordinator cannot write. So a write that finds no space, or
no free file, is repeated for as long as islands last without the coordinator, and
people are told. No other error of a disk is repeated, since what is on the disk is then
unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco_jax.errors import PASSING, lack, remedy

logger = logging.getLogger(__name__)

AGAIN_S = 0.5
"""Pause before a write that found no space is repeated, in seconds."""


class DiskWait:
    """Repeats writes of small files. Any thread may read `alerts`."""

    def __init__(self, patience_s: float, ended: Callable[[], bool]) -> None:
        """patience_s: longest wait for one write. ended: asked between two attempts;
        once it is true, nothing is waited for."""
        self._patience_s, self._ended = patience_s, ended
        self.touch: Callable[[], None] = lambda: None
        """Called between two attempts: the thread that waits does not hang."""
        self._waiting: dict[str, str] = {}
        """Waits, by the name of the data to be written."""
        self._over: list[str] = []

    @property
    def alerts(self) -> list[str]:
        """One alert for each kind of data that cannot be written at the moment."""
        return list(self._waiting.values())

    def over(self) -> list[str]:
        """Return one line for each wait that has ended since the last call."""
        over, self._over = self._over, []
        return over

    def until_written(self, what: str, write: Callable[[], None]) -> None:
        """Repeat `write` until there is room for it.

        Raises OSError, naming the file, the deadline and the remedy, if there is none
        in time. Any other error of the disk is raised at once.
        """
        began = time.monotonic()
        while True:
            try:
                write()
                break
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                waited_s = time.monotonic() - began
                if self._ended() or waited_s >= self._patience_s:
                    raise given_up(what, waited_s, self._patience_s, error) from error
                self._tell(
                    what,
                    f"{what} waits for {lack(error)} in {error.filename} "
                    f"({error.strerror}), and no merge ends meanwhile; islands train "
                    f"on: {remedy(error)} within {self._patience_s:g} s (4 * "
                    f"placement.outage_budget_s), or the coordinator ends",
                )
            self.touch()
            time.sleep(AGAIN_S)
        if self._waiting.pop(what, None):
            waited_s = time.monotonic() - began
            self._over.append(f"{what} waited {waited_s:.1f} s to be written")

    def once(self, what: str, write: Callable[[], None]) -> None:
        """Call `write` once, as `put_off` runs a block."""
        with self.put_off(what):
            write()

    @contextmanager
    def put_off(self, what: str) -> Iterator[None]:
        """Run the block; a full disk, or no free file, raises an alert instead of an
        error.

        The caller tries again later.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self._tell(
                what,
                f"{what} cannot be written to {error.filename} ({error.strerror}) and "
                f"is tried again; {remedy(error)}",
            )
        else:
            self._waiting.pop(what, None)

    def _tell(self, what: str, text: str) -> None:
        if what not in self._waiting:
            logger.warning("%s", text)
        self._waiting[what] = text


def given_up(what: str, waited_s: float, patience_s: float, error: OSError) -> OSError:
    """Return the error of a write that was repeated for as long as islands wait."""
    return OSError(
        error.errno,
        f"{what} could not be written for {waited_s:.0f} s ({error.strerror}), of "
        f"{patience_s:g} (4 * placement.outage_budget_s) in which islands wait for it; "
        f"mend that disk, or {remedy(error)}, and start the coordinator again",
        error.filename,
    )
