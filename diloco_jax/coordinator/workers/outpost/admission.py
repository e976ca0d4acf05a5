"""The lead that an outpost obeys: the newest of one run, across restarts of either."""

from __future__ import annotations

import threading
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.protocol.holding import BeginWorker, FirstWord
from diloco_jax.wire.errors import Refused


class Admission:
    """Remembers on disk which lead was obeyed last. Thread-safe."""

    def __init__(self, workdir: Path, index: int) -> None:
        """workdir: the worker's. index: number of the worker."""
        self._workdir, self._index = workdir, index
        self._lock = threading.Lock()

    def admit(self, word: FirstWord) -> None:
        """Obey the lead that says this. Raises Refused for an older lead, for another
        worker, and for another run than the one that is here."""
        if word.worker != self._index:
            raise Refused(
                "worker",
                f"this is worker {self._index}, and the lead asks for worker "
                f"{word.worker}; check placement.worker_addresses, and --index",
            )
        with self._lock:
            obeyed = rendezvous.obeyed(self._workdir)
            run_id, lead, _ = obeyed
            path = self._workdir / run_files.WORKERS / "lead.json"
            if run_id and word.run_id != run_id:
                raise Refused(
                    "run_id",
                    f"{self._workdir} of worker {self._index} holds fragments of run "
                    f"{run_id}, and the lead's run is {word.run_id}; give another "
                    f"--workdir, or remove that one",
                )
            after = obeyed.after(word)
            if after is None:
                raise Refused(
                    "lead",
                    f"worker {self._index} obeys lead {lead} of run {run_id}, and this "
                    f"is lead {word.lead}: another coordinator of this run was started "
                    f"later; end one of them. If no other one is there, as after a "
                    f"wrong clock, remove {path}",
                )
            rendezvous.obey(self._workdir, after)

    def require_current(self, begin: BeginWorker) -> None:
        """Raise Refused if another line was admitted since this one."""
        with self._lock:
            _, lead, dial = rendezvous.obeyed(self._workdir)
        if (lead, dial) != (begin.lead, begin.dial):
            raise Refused("lead", f"lead {lead} came meanwhile; end one of the two")
