"""Notice what no decision sees: hanging, slow or diverging islands, clock jumps,
growing memory, a disk that fills, a machine that sleeps, a lead that hangs.

The `Watchdog` reads the status, and this machine. It decides nothing: it tells people,
once for each time that something begins, and gives freed memory back. The bytes that
must be free follow from the size of the state, as those of `diloco plan` do.

Islands train on while the coordinator cannot write. So a write that finds no space, or
no free file, is repeated for as long as islands last without the coordinator
(`DiskWait`). No other error of a disk is repeated, since what is on the disk is then
unknown.

A disk, or a piece of code of one's own, that never answers holds the thread of
decisions for ever, while the others go on: such a coordinator accepts islands and
answers `diloco status`, and nothing is merged. `TurnWatch` ends its process. Whoever
supervises it starts it again, as after a kill: what was decided and seen is durable.

The monotonic clock stands still while a machine sleeps, or is stopped as a virtual
machine, on Linux. Silences and waits go by it: nobody could be heard then, and nobody
is late.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diloco_jax import checkpoint
from diloco_jax.config import Config, Placement
from diloco_jax.coordinator.holding.fragment_snapshots import SPARED_BYTES
from diloco_jax.coordinator.settings import next_snapshots, state_sizes
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.errors import EXIT_FAILED, PASSING, lack, remedy
from diloco_jax.files import is_bucket
from diloco_jax.machine import (
    LITTLE_DISK_BYTES,
    give_memory_back,
    left_bytes,
    resident_bytes,
)
from diloco_jax.observability.exported import Readings
from diloco_jax.observability.measures import RecentGoodput
from diloco_jax.process import HangDetector, leave_at_once

logger = logging.getLogger(__name__)

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
    """An island as last seen. since: when its incarnation began to start, or made its
    last step. best: its best speed."""

    incarnation: int
    starts: bool
    trains: bool
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
        for name, island in islands.items():
            for what in island["short"]:
                left = "space on the disk" if what == "disk" else what
                yield (
                    f"short-{what} {name}",
                    f"island {name} says that little {left} is left on a machine of "
                    f"its hosts: its process may end for it; its log says how much",
                )
            seen = self._see(name, island, now)
            if seen.starts and now - seen.since > self._compile_budget_s:
                yield (
                    f"starts {name}",
                    f"island {name} has been {island['state']} for "
                    f"{self._compile_budget_s:.0f} s, placement.compile_budget_s: its "
                    f"devices, its compiler or its link may hang; look at its log; it "
                    f"ends by itself after placement.hang_budget_s more",
                )
            if not seen.trains or status["phase"] != "running":
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

    def _see(self, name: str, island: Mapping[str, Any], now: float) -> _Seen:
        incarnation, steps = island["incarnation"], island["steps"]
        starts, trains = island["state"] in STARTS, island["state"] in TRAINS
        before = self._islands.get(name)
        if before is None or before[:3] != (incarnation, starts, trains):
            before = _Seen(incarnation, starts, trains, steps, now, 0.0)
        since = now if trains and steps != before.steps else before.since
        known = island["tokens_per_second"] if steps >= KNOWN_STEPS else 0.0
        best = max(before.best, known)
        seen = before._replace(steps=steps, since=since, best=best)
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
        """placement: with the outage budget of the run's size (`lasting`). A turn
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


WORKDIR, CHECKPOINTS = "workdir", "checkpoints"


class DiskNeed:
    """The folders that a coordinator writes to, and the bytes that each must have
    free."""

    def __init__(self, config: Config, plan: FragmentPlan, workdir: Path) -> None:
        """config: with a resolved outer optimizer. plan: that of the model."""
        self._placement, self._fragments = config.placement, len(plan.sizes)
        self._sizes = state_sizes(config.run, plan)
        self.folders = {WORKDIR: workdir}
        elsewhere = config.placement.checkpoints
        self._snapshots: Path | None = None
        """Folder of snapshots on a disk; None if they are in a bucket, or on the
        machines of workers."""
        if elsewhere and not is_bucket(elsewhere):
            self.folders[CHECKPOINTS] = Path(elsewhere)
        if not (is_bucket(elsewhere) or config.placement.worker_addresses):
            folder = checkpoint.snapshots_folder(config.placement, workdir)
            self._snapshots = Path(folder)

    def free(self, status: Mapping[str, Any]) -> dict[Path, int]:
        """Return the bytes that each folder must have free for the next round of
        snapshots and the publishes meanwhile. Of folders on one disk the first has what
        all of them need, and the others nothing. status: see `summary.status`."""
        needed = dict.fromkeys(self.folders.values(), 0)
        if not self._placement.worker_addresses:
            merges_per_s = status["merges"] / max(status["seconds"], 1.0)
            publish = self._sizes.publish / self._fragments
            round_s = self._placement.snapshot_every_s
            needed[self.folders[WORKDIR]] += round(merges_per_s * publish * round_s)
        if self._snapshots is not None:
            state, largest, _ = self._sizes
            held = _bytes_in(self._snapshots)
            where = self.folders.get(CHECKPOINTS, self.folders[WORKDIR])
            needed[where] += next_snapshots(self._placement, state, largest, held)
        return _by_disk(needed)


def _by_disk(needed: Mapping[Path, int]) -> dict[Path, int]:
    found, firsts = dict[Path, int](), dict[int, Path]()
    for folder, octets in needed.items():
        first = firsts.setdefault(_disk_of(folder), folder)
        found.setdefault(folder, 0)
        found[first] += octets + (SPARED_BYTES if first == folder else 0)
    return found


def _disk_of(folder: Path) -> int:
    """Return the number of the disk that a folder is on, or will be made on."""
    made = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    return made.stat().st_dev


def _bytes_in(folder: Path) -> int:
    found = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # It was removed meanwhile.
                found += os.stat(os.path.join(where, name)).st_size
    return found


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

    @contextlib.contextmanager
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
