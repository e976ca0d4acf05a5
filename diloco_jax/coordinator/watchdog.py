"""Notice what no decision sees: hanging, slow or diverging islands, clock jumps,
growing memory, a disk that fills, a machine that sleeps, a lead that hangs.

The `Watchdog` reads the status, and this machine. It decides nothing: it tells people,
once for each time that something begins, and gives freed memory back.

A disk, or a piece of code of one's own, that never answers holds the thread of
decisions for ever, while the others go on: such a coordinator accepts islands and
answers `diloco status`, and nothing is merged. `TurnWatch` ends its process. Whoever
supervises it starts it again, as after a kill: what was decided and seen is durable.

The monotonic clock stands still while a machine sleeps, or is stopped as a virtual
machine, on Linux. Silences and waits go by it: nobody could be heard then, and nobody
is late.
"""

from __future__ import annotations

import faulthandler
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax.config import Placement
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.machine import (
    LITTLE_DISK_BYTES,
    give_memory_back,
    left_bytes,
    resident_bytes,
)
from diloco_jax.observability.exported import Readings
from diloco_jax.observability.measures import RecentGoodput
from diloco_jax.process import HangDetector, leave_at_once

HANGING_STEPS = 20
"""Median steps without a step after which an island hangs, at least three time
budgets."""
KNOWN_STEPS = 32
"""Steps of an incarnation from which on its speed and its loss count."""
SLOWER = 2.0
"""Multiple of its shortest median step from which on an island is slow."""
APART = 1.2, 0.2
"""Multiple of the others' median loss, and nats above it, beyond both of which an
island's loss is apart."""
APART_S = 60.0
"""Seconds for which it has to be apart."""
GOODPUT, GOODPUT_AFTER_S = 0.5, 600.0
"""Goodput of the last hour that is low, and how much of it must have been seen."""
JUMP_S = 5.0
"""Seconds by which a clock jumps at least."""
WARM_S = 600.0
"""Age of a coordinator whose memory is compared with later."""
GROWN = 1.5, 1 << 30
"""Multiple of the memory, and bytes above it, beyond both of which it has grown."""
LEFT = 0.05
"""Share of a machine's memory below which little is left."""
MACHINE_EVERY_S = 5.0
"""Seconds between two looks at memory and disks."""
TRAINS = ("training", "quarantined")
STARTS = ("joining", "compiling")
BRIEFLY = {
    "hangs": "{} makes no step",
    "starts": "{} does not begin to train",
    "slow": "{} has slowed down",
    "apart": "the loss of {} parts from the others",
    "goodput": "goodput is low",
    "memory": "the coordinator's memory grows",
    "short-memory": "little memory is left on a machine of {}",
    "short-disk": "little space is left on a disk of {}",
    "left": "little memory is left on the coordinator's machine",
    "disk": "little space is left in {}",
}
"""Short names of troubles, by their kind."""


class Gauges(NamedTuple):
    """Functions that read a machine's clocks and memory, in seconds and bytes."""

    unix: Callable[[], float] = time.time
    resident: Callable[[], int] = resident_bytes
    left: Callable[[], tuple[int, int]] = left_bytes
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    give_back: Callable[[], None] = give_memory_back


class _Seen(NamedTuple):
    """An island as last seen: its incarnation, its steps and since when it has them,
    and its best speed."""

    incarnation: int
    steps: int
    since: float
    best: float


class Watchdog:
    """Watches one run from its coordinator. Use it from one thread."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        budget_s: float,
        now: float,
        machine: Gauges = Gauges(),  # noqa: B008
        *,
        compile_budget_s: float = math.inf,
        needed: Callable[[Mapping[str, Any]], Mapping[Path, int]] = lambda status: {},
    ) -> None:
        """folders: those that the coordinator writes to, by name. budget_s: the time
        budget. compile_budget_s: longest start of an island. needed: returns the bytes
        that each folder must have free, by the status. now: seconds of the clock of
        later times."""
        self._needed = needed
        self._compile_budget_s = compile_budget_s
        self._starts: dict[str, tuple[int, float]] = {}
        """Incarnations that start, and since when."""
        self._folders, self._least_s, self._machine = folders, 3 * budget_s, machine
        self._islands: dict[str, _Seen] = {}
        self._began, self._looked = now, -math.inf
        self._recent = RecentGoodput()
        self._ahead = machine.unix() - now
        """Unix time less that of the other clock."""
        self._warm = 0
        """Resident bytes once the coordinator was warm."""
        self._since: dict[str, float] = {}
        """When what is wrong began, by its name."""
        self._told: set[str] = set()
        self.machine = Readings()
        """The machine's readings at the last look."""

    def look(self, status: Mapping[str, Any], now: float) -> list[str]:
        """Return what is newly wrong, for people. status: see `summary.status`."""
        found = dict(self._of_islands(status, now))
        self._recent.note(status, now)
        found |= dict(self._of_run(status))
        alerts = [*self._clock(now)]
        if now - self._looked >= MACHINE_EVERY_S:
            self._looked = now
            machine = dict(self._of_machine(status, now))
            alerts += self._new("machine ", machine, now)
        return alerts + self._new("run ", found, now)

    def _new(self, group: str, found: dict[str, str], now: float) -> list[str]:
        """Return the texts of what has just begun to be wrong for long enough."""
        wrong = {group + name: text for name, text in found.items()}
        for name in [n for n in self._since if n.startswith(group) and n not in wrong]:
            del self._since[name]
            self._told.discard(name)
        alerts = []
        for name, text in wrong.items():
            began = self._since.setdefault(name, now)
            lasts_s = APART_S if name.startswith("run apart") else 0.0
            if name not in self._told and now - began >= lasts_s:
                self._told.add(name)
                alerts.append(text)
        return alerts

    @property
    def wrong(self) -> list[str]:
        """Return what is wrong now and was told, in few words each."""
        found = (name.split(" ", 2) for name in sorted(self._told))
        return [BRIEFLY[kind].format(*which) for _, kind, *which in found]

    # ---- islands --------------------------------------------------------------------

    def _of_islands(
        self, status: Mapping[str, Any], now: float
    ) -> Iterator[tuple[str, str]]:
        islands = status["islands"]
        losses = {
            name: island["loss"]
            for name, island in islands.items()
            if island["state"] in TRAINS
            and island["loss"] is not None
            and island["steps"] >= KNOWN_STEPS
        }
        for name in [known for known in self._islands if known not in islands]:
            del self._islands[name]
        yield from self._of_starts(islands, now)
        for name, island in islands.items():
            for what in island["short"]:
                left = "space on the disk" if what == "disk" else what
                yield (
                    f"short-{what} {name}",
                    f"island {name} says that little {left} is left on a machine of "
                    f"its hosts: its process may end for it; its log says how much",
                )
            seen = self._see(name, island, now)
            if island["state"] not in TRAINS or status["phase"] != "running":
                continue
            step_s = island["median_step_seconds"]
            limit_s = max(HANGING_STEPS * step_s, self._least_s)
            if seen.steps >= 2 and now - seen.since > limit_s:
                yield (
                    f"hangs {name}",
                    f"island {name} has made no step for {limit_s:.0f} s, and its "
                    f"steps take {step_s:.3g} s: it hangs in its step, or waits for "
                    f"data; look at its log, and at its devices; it ends by itself "
                    f"after placement.hang_budget_s",
                )
            speed = island["tokens_per_second"]
            if 0 < speed < seen.best / SLOWER:
                yield (
                    f"slow {name}",
                    f"island {name} has slowed down: {speed:.3g} tokens per second, "
                    f"and {seen.best:.3g} before; look at its machine, and at what "
                    f"else runs there",
                )
            others = [loss for other, loss in losses.items() if other != name]
            if name in losses and len(others) >= 2:
                usual = statistics.median(others)
                if losses[name] > APART[0] * usual + APART[1]:
                    yield (
                        f"apart {name}",
                        f"the loss of island {name} is {losses[name]:.3g}, that of the "
                        f"others {usual:.3g}: it parts from them; look at its data, "
                        f"and at its devices",
                    )

    def _of_starts(
        self, islands: Mapping[str, Any], now: float
    ) -> Iterator[tuple[str, str]]:
        starts = {
            name: island["incarnation"]
            for name, island in islands.items()
            if island["state"] in STARTS
        }
        known, self._starts = self._starts, {}
        for name, incarnation in starts.items():
            before, since = known.get(name, (0, now))
            since = since if before == incarnation else now
            self._starts[name] = incarnation, since
            if now - since > self._compile_budget_s:
                yield (
                    f"starts {name}",
                    f"island {name} has been {islands[name]['state']} for "
                    f"{self._compile_budget_s:.0f} s, placement.compile_budget_s: its "
                    f"devices, its compiler or its link may hang; look at its log; it "
                    f"ends by itself after placement.hang_budget_s more",
                )

    def _see(self, name: str, island: Mapping[str, Any], now: float) -> _Seen:
        before = self._islands.get(name)
        incarnation, steps = island["incarnation"], island["steps"]
        trains = island["state"] in TRAINS
        if before is None or before.incarnation != incarnation or not trains:
            before = _Seen(incarnation, -1, now, 0.0)
        since = before.since if steps == before.steps else now
        known = island["tokens_per_second"] if steps >= KNOWN_STEPS else 0.0
        seen = _Seen(incarnation, steps, since, max(before.best, known))
        self._islands[name] = seen
        return seen

    def _of_run(self, status: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        recent, seconds = self._recent.goodput, self._recent.seconds
        low = recent < GOODPUT and seconds >= GOODPUT_AFTER_S
        if low and status["islands"]:
            yield (
                "goodput",
                f"goodput of the last {seconds / 60:.0f} minutes is {recent:.0%} "
                f"({status['goodput']:.0%} in the whole run): less than {GOODPUT:.0%} "
                f"of what undisturbed islands would have computed is merged; see which "
                f"island was away, and tokens_lost of the summary",
            )

    # ---- the coordinator's machine --------------------------------------------------

    def _clock(self, now: float) -> Iterator[str]:
        ahead = self._machine.unix() - now
        jumped_s, self._ahead = ahead - self._ahead, ahead
        if abs(jumped_s) >= JUMP_S:
            yield (
                f"this machine's clock jumped by {jumped_s:+.0f} s, or the machine was "
                f"suspended; no deadline goes by it, but certificates and "
                f"incarnations do: look at its time service"
            )

    def _of_machine(
        self, status: Mapping[str, Any], now: float
    ) -> Iterator[tuple[str, str]]:
        machine = self._machine
        resident, (left, whole) = machine.resident(), machine.left()
        free = {folder: machine.free(folder) for folder in self._folders.values()}
        if not self._warm and now - self._began >= WARM_S:
            self._warm = resident
        most = GROWN[0] * self._warm + GROWN[1]
        little = whole and left < LEFT * whole
        if little or (self._warm and resident > most):
            machine.give_back()
            resident, (left, whole) = machine.resident(), machine.left()
        free_named = {name: free[folder] for name, folder in self._folders.items()}
        self.machine = Readings(resident, left, whole, free_named)
        if self._warm and resident > most:
            yield (
                "memory",
                f"the coordinator's memory has grown from {self._warm / 1e9:.1f} to "
                f"{resident / 1e9:.1f} GB; the run goes on: a restart of the "
                f"coordinator costs it nothing; lower placement.merge_buffer_bytes",
            )
        if whole and left < LEFT * whole:
            yield (
                "left",
                f"{left / 1e9:.1f} of {whole / 1e9:.1f} GB of memory are left on the "
                f"coordinator's machine; end what else runs there, or lower "
                f"placement.merge_buffer_bytes",
            )
        needed = self._needed(status)
        for folder, octets in free.items():
            least = max(needed.get(folder, 0), LITTLE_DISK_BYTES)
            if octets < least:
                yield (
                    f"disk {folder}",
                    f"{octets / 1e6:.0f} MB are free in {folder}, and the next round "
                    f"of snapshots and publishes needs {least / 1e6:.0f}: merges wait "
                    f"once it is full; free some space there",
                )


TOLD_WITHIN_S = 10.0
"""Most seconds for the last words of a process: its log may be what hangs."""


class TurnWatch(HangDetector):
    """Watches the lead's turns, each of which ends with a `touch`. A turn that waits
    for space on a full disk touches as it tries again."""

    def __init__(
        self,
        placement: Placement,
        hangs: Callable[[str], None] = lambda text: leave_at_once(EXIT_FAILED),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """placement: with the outage budget of the run's size (`restart_time`). A turn
        may have to wait until the disk has taken what others wrote to it, which is less
        than a restart reads."""
        self._placement = placement
        limit_s = placement.outage_budget_s + placement.deadlines.pin_s
        super().__init__(limit_s, hangs, clock)

    def words(self, quiet_s: float) -> str:
        """See `HangDetector`."""
        placement = self._placement
        return (
            f"hangs: no turn of the coordinator's decisions has ended for "
            f"{quiet_s:.0f} s; one may take placement.outage_budget_s = "
            f"{placement.outage_budget_s:g} and {placement.deadlines.pin_s:g} s more, "
            f"by placement.time_budget_s = {placement.time_budget_s:g}; the process "
            f"ends, to be started again"
        )

    def _tell(self) -> None:
        # A thread without Python's lock: a pipe that nobody reads may hold that, too.
        # Its exit code is 1, EXIT_FAILED.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(TOLD_WITHIN_S, exit=True, file=nowhere)
        try:
            super()._tell()
        finally:
            faulthandler.cancel_dump_traceback_later()
            os.close(nowhere)


LEAST_S = 1.0
"""Shortest sleep that is noticed. A clock that is merely corrected moves by less."""


class Sleeps:
    """Notices how long the monotonic clock stood still, by the time of day. That is set
    as a machine wakes up, and a virtual one by the tools of its host."""

    def __init__(
        self,
        unix: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unix, self._monotonic = unix, monotonic
        self._ahead_s = unix() - monotonic()

    def since_last_s(self) -> float:
        """Return the seconds of sleep since the last call, 0 if there was none. A time
        of day that was wrong, and is put forward, looks the same."""
        ahead_s = self._unix() - self._monotonic()
        slept_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        return slept_s if slept_s >= LEAST_S else 0.0
