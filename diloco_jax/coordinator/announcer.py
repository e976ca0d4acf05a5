"""Tell people the coordinator's status, and the alerts in it."""

from __future__ import annotations

import contextlib
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.disk_need import DiskNeed
from diloco_jax.coordinator.disk_wait import DiskWait
from diloco_jax.coordinator.exporter import Exporter
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.snapshots import SnapshotWriter
from diloco_jax.coordinator.watchdog import Watchdog
from diloco_jax.coordinator.workers.holder import WorkersHolder
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.files import write_text
from diloco_jax.observability.alarm import Alarm
from diloco_jax.observability.exported import Snapshot
from diloco_jax.observability.metrics import Metrics
from diloco_jax.wire.tls import TlsFiles

REFRESH_S = 0.5
"""Greatest age of what `diloco status` shows, in seconds."""


class Announcer:
    """Makes the status now and then, on the lead's thread; any thread may read it."""

    def __init__(
        self,
        config: Config,
        plan: FragmentPlan,
        workdir: Path,
        *,
        roster: Roster,
        metrics: Metrics,
        holder: StoreHolder | WorkersHolder,
        snapshots: SnapshotWriter,
        disk: DiskWait,
        tls: TlsFiles | None,
        begun_unix: float,
    ) -> None:
        """config: resolved. begun_unix: start of the run in unix seconds."""
        placement = config.placement
        self._roster, self._metrics, self._holder = roster, metrics, holder
        self._snapshots, self._disk, self._begun_unix = snapshots, disk, begun_unix
        self._refreshed, self._status = 0.0, dict[str, Any]()
        self._alerts_raised = self._events_waiting = 0
        self._wrong: list[str] = []
        need = DiskNeed(config, plan, workdir)
        began = time.monotonic()
        self._watchdog = Watchdog(
            need.folders,
            placement.time_budget_s,
            began,
            compile_budget_s=placement.compile_budget_s,
            needed=need.free,
        )
        self._machine = self._watchdog.machine
        self._placement, self._tls = placement, tls
        self._told_at = workdir / run_files.METRICS_ADDRESS
        self._alarm: Alarm | None = None
        self._open = contextlib.ExitStack()

    def begin(self, lead: Lead) -> None:
        """Make the first status; deliver alerts, and let Prometheus collect numbers,
        from now on. Raises ConfigError if the port for that cannot be bound."""
        self.refresh(lead)
        run_id = lead.config.run_id
        if self._placement.metrics_bind:
            exporter = Exporter(
                self._placement.metrics_bind,
                self.snapshot,
                tls=self._tls,
                insecure=self._placement.insecure,
            )
            exporter.start()
            self._open.callback(exporter.close)
            write_text(exporter.url, self._told_at)
            self._open.callback(self._told_at.unlink, missing_ok=True)
        self._alarm = Alarm(self._placement, run_id, lambda: self.shown()["alerts"])
        self._alarm.start()

    def stop(self, within_s: float) -> None:
        """Deliver the last alerts, within these seconds, and close the port."""
        if self._alarm is not None:
            self._alarm.close(within_s)
        self._open.close()

    def due(self, now: float) -> bool:
        """Tell if it is time for another status."""
        return now - self._refreshed >= REFRESH_S

    def refresh(self, lead: Lead) -> None:
        """Make another status, and look for what is newly wrong."""
        now, clock = time.time(), time.monotonic()
        self._refreshed = clock
        own = [*self._snapshots.alerts(clock), *self._holder.alerts(clock)]
        untold, lead.journal.untold = lead.journal.untold, []
        if self._alarm is not None:
            for text in untold:
                self._alarm.raised(text)
        self._alerts_raised = lead.journal.alerts_raised
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
        self._events_waiting = lead.waiting
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

    def snapshot(self) -> Snapshot:
        """Return what Prometheus collects."""
        return Snapshot(
            version=metadata.version("diloco-jax"),
            status=self.shown(),
            machine=self._watchdog.machine,
            alerts_raised=self._alerts_raised,
            events_waiting=self._events_waiting,
            merge=self._metrics.last_merge,
        )

    def _uses(self) -> dict[str, Any]:
        """Return the bytes of this machine, and what each worker has of its memory."""
        workers = self._holder.shown().get("workers", ())
        return {
            **self._machine.named(),
            "workers_memory_bytes": [worker["resident_bytes"] for worker in workers],
        }
