"""Carry out a schedule on a local run, and note what was struck in `chaos.jsonl`.

What each strike has cost is said while the run goes on, as soon as that is known.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.chaos import measure
from diloco_jax.chaos.relay import Relay
from diloco_jax.chaos.schedule import OF_DISK, Strike
from diloco_jax.cluster.processes import noted, signal_group
from diloco_jax.faults import COORDINATOR
from diloco_jax.observability.failures import LostTokens
from diloco_jax.observability.tape import JsonLines, NewLines


class LiveReport:
    """Follows the tape of a run; say: tells people."""

    def __init__(
        self, workdir: Path, islands: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._islands, self._say = tuple(islands), say
        self._new = NewLines(workdir / run_files.TAPE)
        self._struck: list[measure.Line] = []
        self._tape: list[dict[str, Any]] = []
        """Lines since the first strike whose cost is not told yet."""
        self._lost = LostTokens()
        """Of the lines before them."""
        self._told: set[tuple[str, float]] = set()

    def struck(self, strike: measure.Line) -> None:
        """Take a strike into account, a line of `chaos.jsonl`."""
        self._struck.append(strike)

    def look(self) -> None:
        """Read what is new, and tell the costs that it shows."""
        self._tape += self._new
        found = measure.measured(self._struck, self._tape, self._islands, self._lost)
        for number, outcome in enumerate(found):
            if (outcome.who, outcome.time) in self._told:
                continue
            # A later strike there leaves no time in which more could become known.
            ends = (outcome.who, COORDINATOR)
            later = any(
                o.who in ends and o.time > outcome.time for o in found[number + 1 :]
            )
            if outcome.merged_s is not None or later:
                self._told.add((outcome.who, outcome.time))
                self._say(in_words(outcome))
        self._forget()

    def _forget(self) -> None:
        """Drop what no strike needs whose cost is not told yet."""
        found = measure.measured(self._struck, (), self._islands)
        open_now = [o.time for o in found if (o.who, o.time) not in self._told]
        since = min(open_now, default=math.inf)
        self._struck = [s for s in self._struck if s["time"] >= since]
        for line in self._tape:
            if line["time"] < since:
                self._lost.take(line)
        self._tape = [r for r in self._tape if r["time"] >= since]
        self._told = {key for key in self._told if key[1] >= since}


def in_words(outcome: measure.StrikeOutcome) -> str:
    """Return what a strike cost, in one line."""
    parts = [
        f"{what} after {seconds:.1f} s"
        for what, seconds in (
            ("noticed", outcome.detected_s),
            ("back", outcome.back_s),
            ("merged again", outcome.merged_s),
        )
        if seconds is not None
    ]
    if outcome.tokens_lost:
        parts.append(f"{outcome.tokens_lost:,} tokens lost")
    told = ", ".join(parts) or "struck again before anything was known"
    return f"{outcome.who} after {outcome.kind}: {told}"


BALLAST = "ballast"
"""Name of the file that takes the space, in the workdir."""
LARGEST_BYTES = 1 << 30
"""Largest free space that `fill` takes: on a larger disk, others may need it."""
PIECE_BYTES = 1 << 20


def fill(folder: Path) -> bool:
    """Take all the free space of the file system; return False, and take none, if it
    has more than LARGEST_BYTES."""
    if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize > LARGEST_BYTES:
        return False
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (PIECE_BYTES, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return True


def free(folder: Path) -> None:
    """Give the space back that `fill` took."""
    (folder / BALLAST).unlink(missing_ok=True)


LOOK_S = 0.5
"""Seconds between two looks for the moment from which times count, and at the tape."""
SLICE_S = 0.2
"""Seconds of one run and one stop of a process that is slowed."""

Moment = Callable[[Path], bool]
"""Tells of a workdir whether the moment has come from which times count."""


def first_merge() -> Moment:
    """Return the moment at which the first merge is on the tape."""
    lines: list[NewLines] = []

    def has_come(workdir: Path) -> bool:
        if not lines:
            lines.append(NewLines(workdir / run_files.TAPE))
        return any(line["kind"] == "merged" for line in lines[0])

    return has_come


class Striker:
    """Strikes a run of this machine on a thread of its own, from a moment on.

    Call `route` for every start of an island; the first call begins the watch.
    say: tells people about a strike.
    """

    def __init__(
        self,
        strikes: Sequence[Strike],
        islands: Sequence[str],
        say: Callable[[str], None],
        *,
        moment: Moment | None = None,
        look_s: float = LOOK_S,
        link_bytes_per_s: float = math.inf,
        link_delay_s: float = 0.0,
    ) -> None:
        """moment: looked for every `look_s`; None = the first merge. link_bytes_per_s,
        link_delay_s: of each whole link; all links pass through relays if one is given.
        """
        self.workdir: Path | None = None
        """Workdir of the run, once an island was started."""
        self._strikes, self._islands, self._say = strikes, tuple(islands), say
        self._moment, self._look_s = moment or first_merge(), look_s
        self._link = link_bytes_per_s, link_delay_s
        self._relayed = {n for s in strikes for n in s.links(islands)}
        if self._link != (math.inf, 0.0):
            self._relayed = set(islands)
        self._relays: dict[str, Relay] = {}
        self._stopped: dict[Strike, list[int]] = {}
        self._unwritten: list[dict[str, Any]] = []
        """Notes that wait for space on the disk."""
        self.done, self.closed = threading.Event(), threading.Event()
        """Set once the last strike is over, and once `close` was called."""
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def route(self, workdir: Path, name: str, address: str) -> str:
        """Return the address at which this island reaches the coordinator."""
        if self.workdir is None:
            self._relays = {name: Relay(address, *self._link) for name in self._relayed}
            self.watch(workdir)
        return self._relays[name].address if name in self._relays else address

    def watch(self, workdir: Path) -> None:
        """Begin, on a run in this workdir whose links are not struck."""
        self.workdir = workdir
        free(workdir)  # What one that was killed had taken.
        self._thread.start()

    def close(self) -> None:
        """Strike no more, end what still strikes, and close the links."""
        self.closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for relay in self._relays.values():
            relay.close()

    # ---- the thread -------------------------------------------------------------

    def _run(self) -> None:
        assert self.workdir is not None
        while not self._moment(self.workdir):
            if self.closed.wait(self._look_s):
                return
        notes = JsonLines(self.workdir / run_files.CHAOS)
        live = LiveReport(self.workdir, self._islands, self._say)
        began = time.monotonic()
        try:
            for at_s, act, strike in _acts(self._strikes):
                if not self._wait_until(began + at_s, live):
                    return
                if act == "begin":
                    live.struck(self._note(notes, strike))
                elif act == "end":
                    self._end(strike)
                    self._write(notes)
                    self._say(f"{strike} is over")
                else:
                    number = signal.SIGSTOP if act == "stop" else signal.SIGCONT
                    self._signal_stopped(strike, number)
            self.done.set()
            self._wait_until(math.inf, live)
        finally:
            for strike in self._strikes:
                self._end(strike)
            self._write(notes)
            notes.close()

    def _wait_until(self, due: float, live: LiveReport) -> bool:
        """Follow the tape until a monotonic time; return False if all is over before
        it."""
        while (left := due - time.monotonic()) > 0:
            if self.closed.wait(min(left, LOOK_S)):
                return False
            if left > LOOK_S:
                live.look()
        return not self.closed.is_set()

    def _note(self, notes: JsonLines, strike: Strike) -> dict[str, Any]:
        """Begin a strike, write it down, and return that line."""
        at = time.time()
        missed = self._begin(strike)
        noted = {
            "time": at,
            "strike": str(strike),
            "who": strike.who,
            "kind": strike.kind,
            "seconds": strike.seconds,
            "missed": missed,
        }
        self._unwritten.append(noted)
        self._write(notes)
        gone = f"; not running: {', '.join(missed)}" if missed else ""
        self._say(f"{strike}{gone}")
        return noted

    def _write(self, notes: JsonLines) -> None:
        """Write down what is not yet, as far as there is space for it."""
        with contextlib.suppress(OSError):
            while self._unwritten:
                notes.append(self._unwritten[0])
                del self._unwritten[0]

    def _begin(self, strike: Strike) -> list[str]:
        """Strike; return the names of processes that did not run."""
        if strike.of_network:
            changes = {
                "partition": {"up": False, "down": False},
                "partition-up": {"up": False},
                "partition-down": {"down": False},
                "throttle": {"bytes_per_s": strike.value},
                "delay": {"delay_s": strike.value},
                "corrupt": {"corrupt": True},
            }[strike.kind]
            for name in strike.links(self._islands):
                self._relays[name].set(**changes)  # type: ignore[arg-type]
            return []
        assert self.workdir is not None
        if strike.kind in OF_DISK:
            return [] if fill(self.workdir) else [*strike.who]
        missed, struck = [], list[int]()
        number = signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP
        pids = noted(self.workdir)
        for name in strike.who:
            hit = [pid for pid in pids.get(name, ()) if signal_group(pid, number)]
            struck += hit
            missed += [] if hit else [name]
        if strike.kind != "kill":
            self._stopped[strike] = struck
        return missed

    def _end(self, strike: Strike) -> None:
        for name in strike.links(self._islands):
            if name in self._relays:
                self._relays[name].set()
        if strike.kind in OF_DISK and self.workdir is not None:
            free(self.workdir)
        self._signal_stopped(strike, signal.SIGCONT)
        self._stopped.pop(strike, None)

    def _signal_stopped(self, strike: Strike, number: signal.Signals) -> None:
        for pid in self._stopped.get(strike, ()):
            signal_group(pid, number)


def _acts(strikes: Sequence[Strike]) -> list[tuple[float, str, Strike]]:
    """Return what is to be done in order, as (seconds, what, strike). What ends at the
    time at which another begins comes first."""
    acts: list[tuple[float, str, Strike]] = []
    for strike in strikes:
        acts.append((strike.at_s, "begin", strike))
        over = strike.at_s + strike.seconds
        if strike.kind == "slow":
            stopped = strike.at_s  # By its beginning.
            while (goes_on := stopped + SLICE_S * (1 - strike.value)) < over:
                acts.append((goes_on, "go on", strike))
                stopped += SLICE_S
                acts.append((min(stopped, over), "stop", strike))
        if strike.seconds:
            acts.append((over, "end", strike))
    ranks = {"go on": 0, "stop": 1, "end": 2, "begin": 3}
    return sorted(acts, key=lambda act: (act[0], ranks[act[1]]))
