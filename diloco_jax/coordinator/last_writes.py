"""Write what a coordinator leaves at its end: measures, the last snapshots, and the
summary, which says that a run is over."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from diloco_jax.config import Config
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.disk_wait import DiskWait
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.state_snapshots import StateSnapshots
from diloco_jax.coordinator.workers.holder import WorkersHolder

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastWrites:
    """The last writes of one life. begun_unix, over_unix: see `summary.write`.
    patience_s: returns the longest wait for a snapshot that is being written."""

    workdir: Path
    config: Config
    lead: Lead
    holder: StoreHolder | WorkersHolder
    log: RecordLog
    states: StateSnapshots
    roster: Roster
    disk: DiskWait
    begun_unix: float
    over_unix: float
    patience_s: Callable[[], float]

    def measures(self) -> None:
        """Write what islands measured."""
        self._write("islands' measures", self.roster.save)

    def summary(self) -> None:
        """Write the summary, unless the run was over before and left it."""
        self._write("the summary", self._sum_up)

    def snapshots(self) -> bool:
        """Write the last snapshots; before the run is over, what there is time for.
        Return whether all of a run that is over is here."""
        began, finished = time.monotonic(), self.lead.finished
        if self.states.writer.wait(self.patience_s) and self.holder.wait(
            lambda: self.patience_s() - (time.monotonic() - began)
        ):
            found = list[bool]()
            self._write("a snapshot", lambda: found.append(self._save()))
            return all(found)
        logger.error(
            "a snapshot has not ended within %g s: none is written at the end, and "
            "the log has everything since the last one%s",
            self.patience_s(),
            "; start the coordinator again, and it writes it" if finished else "",
        )
        return not finished

    def _write(self, what: str, write: Callable[[], None]) -> None:
        """Wait for room on the disk only if the run is over: the sender of a signal may
        not wait."""
        repeat = self.disk.until_written if self.lead.finished else self.disk.once
        repeat(what, write)

    def _save(self) -> bool:
        deadlines = self.config.placement.deadlines
        within_s = None if self.lead.finished else deadlines.stop_s / 2
        self.states.write_last(self.lead.state, self.log)
        return self.holder.save_all(within_s)

    def _sum_up(self) -> None:
        summary.write(
            self.workdir,
            self.config,
            self.lead,
            self.roster,
            begun_unix=self.begun_unix,
            over_unix=self.over_unix,
            digest=self.holder.digest(),
        )
