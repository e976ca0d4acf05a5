"""Carry out a schedule on a local run, and note what was struck in `chaos.jsonl`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.chaos.relay import Relay
from diloco_jax.chaos.schedule import Strike
from diloco_jax.observability.tape import JsonLines, read_tape

LOOK_S = 0.5
"""Seconds between two looks for the first merge."""


class Striker:
    """Strikes a run of this machine on a thread of its own, from the first merge on.

    Call `route` for every start of an island; the first call begins the watch.
    say: tells people about a strike.
    """

    def __init__(
        self,
        strikes: Sequence[Strike],
        islands: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self.workdir: Path | None = None
        """Workdir of the run, once an island was started."""
        self._strikes, self._islands, self._say = strikes, tuple(islands), say
        self._relayed = {n for s in strikes for n in s.links(islands)}
        self._relays: dict[str, Relay] = {}
        self._stopped: dict[Strike, list[int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def route(self, workdir: Path, name: str, address: str) -> str:
        """Return the address at which this island reaches the coordinator."""
        if self.workdir is None:
            self.workdir = workdir
            self._relays = {name: Relay(address) for name in self._relayed}
            self._thread.start()
        return self._relays[name].address if name in self._relays else address

    def close(self) -> None:
        """Strike no more, end what still strikes, and close the links."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for relay in self._relays.values():
            relay.close()

    # ---- the thread -------------------------------------------------------------

    def _run(self) -> None:
        assert self.workdir is not None
        while not _merged_once(self.workdir):
            if self._over.wait(LOOK_S):
                return
        acts: list[tuple[float, int, Strike]] = []
        for strike in self._strikes:
            acts.append((strike.at_s, 1, strike))
            if strike.seconds:
                acts.append((strike.at_s + strike.seconds, 0, strike))
        # What ends at the time at which another begins comes first.
        acts.sort(key=lambda act: act[:2])
        notes = JsonLines(self.workdir / run_files.CHAOS)
        began = time.monotonic()
        try:
            for at_s, begins, strike in acts:
                if self._over.wait(max(0.0, began + at_s - time.monotonic())):
                    return
                if not begins:
                    self._end(strike)
                    self._say(f"{strike} is over")
                    continue
                at = time.time()
                missed = self._begin(strike)
                notes.append(
                    {
                        "time": at,
                        "strike": str(strike),
                        "who": strike.who,
                        "kind": strike.kind,
                        "seconds": strike.seconds,
                        "missed": missed,
                    }
                )
                gone = f"; not running: {', '.join(missed)}" if missed else ""
                self._say(f"{strike}{gone}")
        finally:
            notes.close()
            for strike in self._strikes:
                self._end(strike)

    def _begin(self, strike: Strike) -> list[str]:
        """Strike; return the names of processes that did not run."""
        if strike.of_network:
            changes = {
                "partition": {"up": False, "down": False},
                "partition-up": {"up": False},
                "partition-down": {"down": False},
                "throttle": {"bytes_per_s": strike.value},
                "delay": {"delay_s": strike.value},
            }[strike.kind]
            for name in strike.links(self._islands):
                self._relays[name].set(**changes)  # type: ignore[arg-type]
            return []
        missed, struck = [], []
        number = signal.SIGKILL if strike.kind == "kill" else signal.SIGSTOP
        for name in strike.who:
            hit = [pid for pid in self._pids(name) if _signal(pid, number)]
            struck += hit
            missed += [] if hit else [name]
        if strike.kind == "stop":
            self._stopped[strike] = struck
        return missed

    def _end(self, strike: Strike) -> None:
        for name in strike.links(self._islands):
            if name in self._relays:
                self._relays[name].set()
        for pid in self._stopped.pop(strike, ()):
            _signal(pid, signal.SIGCONT)

    def _pids(self, name: str) -> list[int]:
        assert self.workdir is not None
        try:
            found = json.loads((self.workdir / run_files.PROCESSES).read_bytes())
        except OSError:
            return []
        return list(found.get(name, ()))


def _signal(pid: int, number: signal.Signals) -> bool:
    """Signal a child and its group, if it still leads one."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
            return True
    return False


def _merged_once(workdir: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return any(r["kind"] == "merged" for r in read_tape(workdir / run_files.TAPE))
    return False
