"""What a coordinator tells people: the status, and the alerts in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_jax.config import Placement
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.alarm import Alarm
from diloco_jax.coordinator.disk_wait import DiskWait
from diloco_jax.coordinator.holder import StoreHolder
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.snapshots import SnapshotWriter
from diloco_jax.coordinator.watchdog import Watchdog
from diloco_jax.coordinator.workers import WorkersHolder
from diloco_jax.observability.metrics import Metrics
from diloco_jax.paths import is_bucket

REFRESH_S = 0.5
"""Greatest age of what `diloco status` shows, in seconds."""


class Announcer:
    """Makes the status now and then, on the lead's thread; any thread may read it."""

    def __init__(
        self,
        placement: Placement,
        workdir: Path,
        *,
        roster: Roster,
        metrics: Metrics,
        holder: StoreHolder | WorkersHolder,
        snapshots: SnapshotWriter,
        disk: DiskWait,
        begun_unix: float,
    ) -> None:
        """begun_unix: start of the run in unix seconds."""
        self._roster, self._metrics, self._holder = roster, metrics, holder
        self._snapshots, self._disk, self._begun_unix = snapshots, disk, begun_unix
        self._refreshed, self._status = 0.0, dict[str, Any]()
        self._machine: dict[str, int] = {}
        self._wrong: list[str] = []
        folders = [workdir]
        if placement.checkpoints and not is_bucket(placement.checkpoints):
            folders.append(Path(placement.checkpoints))
        began = time.monotonic()
        self._watchdog = Watchdog(folders, placement.time_budget_s, began)
        self._placement = placement
        self.stop: Callable[[float], None] = lambda within_s: None
        """Deliver the last alerts, within these seconds."""

    def begin(self, lead: Lead) -> None:
        """Make the first status, and deliver alerts from now on."""
        self.refresh(lead)
        run_id = lead.config.run_id
        alarm = Alarm(self._placement, run_id, lambda: self.shown()["alerts"])
        alarm.start()
        self.stop = alarm.close

    def due(self, now: float) -> bool:
        """Tell if it is time for another status."""
        return now - self._refreshed >= REFRESH_S

    def refresh(self, lead: Lead) -> None:
        """Make another status, and look for what is newly wrong."""
        now, clock = time.time(), time.monotonic()
        self._refreshed = clock
        own = [*self._snapshots.alerts(clock), *self._holder.alerts(clock)]
        self._status = summary.status(
            lead.config,
            lead.state,
            self._roster,
            seconds=now - self._begun_unix,
            alerts=[*lead.journal.alerts, *own, *self._metrics.alerts],
            now=now,
            tally=lead.tally,
        )
        for wrong in self._watchdog.look(self._status, clock):
            lead.journal.alert(wrong)
        self._wrong = self._watchdog.wrong
        if (machine := self._watchdog.machine) is not self._machine:
            self._machine = machine
            self._metrics.append({"kind": "machine", "time": now, **self._uses()})

    def shown(self) -> dict[str, Any]:
        """Return the status, with what holds up the next one: a full disk."""
        shown = {**self._status, **self._holder.shown()}
        return {
            **shown,
            "machine": self._uses(),
            "wrong": self._wrong,
            "alerts": [*self._disk.alerts, *shown["alerts"]],
        }

    def _uses(self) -> dict[str, Any]:
        """Return the bytes of this machine, and what each worker has of its memory."""
        workers = self._holder.shown().get("workers", ())
        return {
            **self._machine,
            "workers_memory_bytes": [worker["resident_bytes"] for worker in workers],
        }
