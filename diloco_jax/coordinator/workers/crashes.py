"""The crashes of a worker in a row: what ended a process, and not what broke a line.

On the lead's machine a process ends with its line. A process on another machine lives
on when the network breaks. Its outpost says when it ends; if the network breaks at that
moment too, the next line tells: the first sign of life there says which process it is
of.
"""

from __future__ import annotations

from diloco_jax.process import crashes_in_a_row


class Crashes:
    """Count the crashes of one worker's processes. Times are of one clock, in
    seconds."""

    def __init__(self, *, ends_with_line: bool) -> None:
        """ends_with_line: a process does not outlive its line."""
        self.in_a_row = 0
        self._ends_with_line = ends_with_line
        self._process, self._began, self._left = "", 0.0, 0.0
        """The last process that was heard, when its first line began, and when its last
        one broke. Empty: its end is counted."""
        self._dialled, self._silent = 0.0, True
        self._silences = 0
        """Lines in a row on which nobody spoke; they count until the process speaks."""

    @property
    def ends(self) -> int:
        """The crashes in a row, without lines on which nobody spoke."""
        return max(0, self.in_a_row - self._silences)

    def line_begins(self, now: float) -> None:
        """Note that a line is made to a process, which may be a new one."""
        self._dialled, self._silent = now, True

    def heard(self, process: str) -> None:
        """Note which process speaks: another one means that the last has ended."""
        self._silent, silences = False, self._silences
        self._silences = 0
        if self._process in ("", process):
            # The network broke them, or the end of a process counts already.
            self.in_a_row = max(0, self.in_a_row - silences)
        else:
            self._count(self._left - self._began)
        if process != self._process:
            self._process, self._began = process, self._dialled

    def excuse(self) -> None:
        """Count nothing of what was: the process there was not to go on."""
        self.in_a_row, self._silences = 0, 0

    def line_broke(self, now: float, *, failed: bool) -> None:
        """Note that the line broke. failed: the process, or its outpost, said that it
        ends."""
        self._left = now
        if failed or self._ends_with_line:
            self._process = ""
            self._count(now - (self._dialled if self._silent else self._began))
        elif self._silent:
            self._silences += 1
            self._count(now - self._dialled)

    def _count(self, ran_s: float) -> None:
        self.in_a_row = crashes_in_a_row(self.in_a_row, ran_s)
