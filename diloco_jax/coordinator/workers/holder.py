"""Hold fragments in worker processes, here or elsewhere: start, watch, start again.

A lead that was killed leaves its workers, and the next one goes on with them.

To the lead this is one holder: each message goes to the worker that has its fragment.
A worker whose line breaks, or that is silent for a lease, is killed, and the lead is
told `WorkerAway`. Once it has decided upon that, it says what is committed
(`bring_back`), and another process begins with it; `WorkerBack` follows when that
serves.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diloco_jax.config import Config
from diloco_jax.coordinator.kept import KeptCycles
from diloco_jax.coordinator.watchdog import clock
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.hearing import Hearing, Tell
from diloco_jax.coordinator.workers.supervised import Shown, Supervised
from diloco_jax.core.fragments import digest_all
from diloco_jax.protocol import tickets
from diloco_jax.protocol.coordinator.events import (
    WorkerBack,
)
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import (
    BeginWorker,
    Committed,
    Drop,
    Forget,
    FragmentsRestored,
    RestoreFragments,
    SaveAll,
    ToHolder,
    first_number,
)
from diloco_jax.protocol.messages import FromCoordinator, Hello, Welcome
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses, bulk
from diloco_jax.wire.bulk import FetchSource
from diloco_jax.wire.errors import Busy, WireError

logger = logging.getLogger(__name__)


class WorkersHolder:
    """The `Holder` of a lead whose fragments are in `placement.workers` processes."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        run_id: str,
        sizes: tuple[int, ...],
        kept: KeptCycles,
        term: int,
    ) -> None:
        """sizes: parameters by fragment. kept: see `Hearing`. term: the run's. No
        process is started before `restore`."""
        count = config.placement.workers
        self._dealt = deal(sizes, count)
        self._hearing = Hearing(
            self._dealt,
            count,
            kept,
            lambda worker: self._workers[worker].elsewhere,
        )
        self._missing: set[int] = set()
        """Fragments that their workers do not have as the run ends."""
        self._run_id, self._key = run_id, secrets.token_bytes(tickets.KEY_BYTES)
        # Longer than an island waits for the coordinator, or takes to join.
        deadlines = config.placement.deadlines
        self._ticket_s = config.placement.alone_s + deadlines.join_s(4 * sum(sizes))
        self._lost: dict[int, tuple[int, ...]] = {}
        """Fragments that workers had lost at the start."""
        self._patience_s = config.placement.outage_budget_s
        at_least = 1
        if config.placement.worker_addresses:
            at_least = first_number(term, time.time())
        lead = rendezvous.next_lead(workdir, at_least)
        fields, self._over = dataclasses.asdict(config), False
        self._workers = [
            Supervised(
                BeginWorker(
                    config=fields,
                    workdir=str(workdir.absolute()),
                    run_id=run_id,
                    worker=number,
                    fragments=self.of(number),
                    bind=addresses.worker_address(config.placement.bind, number),
                    ticket_key=self._key,
                    lead=lead,
                ),
                config,
                functools.partial(self._hearing.hear, number),
                self._hearing.fail,
            )
            for number in range(count)
        ]

    def of(self, worker: int) -> tuple[int, ...]:
        """Return the fragments of a worker."""
        return tuple(f for f, own in enumerate(self._dealt) if own == worker)

    def completed(self, hello: Hello, message: FromCoordinator) -> FromCoordinator:
        """Complete a message for the island that said hello: with tickets and, if it is
        a Welcome, with the addresses at which workers serve, or served."""
        if isinstance(message, Welcome):
            at = tuple(worker.address for worker in self._workers)
            message = replace(message, workers=at)
        whose = tickets.Permit(self._run_id, hello.island, hello.incarnation, 0, 0)
        until = clock() + self._ticket_s
        return tickets.stamped(self._key, message, whose, until)

    def processes(self) -> list[Shown]:
        """Return the facts about all workers that `diloco status` shows."""
        return [worker.shown() for worker in self._workers]

    def shown(self) -> dict[str, Any]:
        """Return what `diloco status` shows beside the run's state."""
        return {"workers": [worker._asdict() for worker in self.processes()]}

    # ---- as the lead's holder -------------------------------------------------------

    def answer(self, tell: Tell, failed: Callable[[BaseException], None]) -> None:
        """Set the callbacks; see `StoreHolder.answer`. Earlier messages of workers wait
        for this call.

        failed: called with the error of a worker that is not started again.
        """
        for worker, lost in self._lost.items():
            tell(WorkerBack(worker=worker, lost=lost))
        self._hearing.begin(tell, failed)

    def hold(self, message: ToHolder) -> None:
        """Pass a message to its fragment's worker; see `engine.Holder`. A worker that
        is away misses it.
        """
        match message:
            case Forget():
                for worker in self._workers:
                    worker.send(message)
            case Drop():
                self._workers[self._dealt[message.delta.fragment]].send(message)
            case _:
                self._workers[self._dealt[message.fragment]].send(message)

    def bring_back(
        self,
        worker: int,
        versions: Sequence[Version],
        fences: tuple[Forget, ...] = (),
    ) -> None:
        """Start a worker that is away; versions: the committed ones, by fragment.
        fences: see `RestoreFragments`."""
        committed = tuple(
            Committed(fragment=f, version=versions[f], digests={})
            for f in self.of(worker)
        )
        asked = RestoreFragments(fragments=committed, fences=fences)
        self._workers[worker].begin(asked)

    def warm_up(self) -> None:
        """Do nothing: workers compile as soon as they have their fragments."""

    def close(self) -> None:
        """Do nothing: workers end after `save_all`, by `end`."""

    # ---- what the process around it asks for ----------------------------------------

    def restore(self, asked: RestoreFragments) -> FragmentsRestored:
        """Start the workers; each brings its fragments to what is committed. Raises
        ConfigError with the reason of the first worker that cannot."""
        for number, worker in enumerate(self._workers):
            own = tuple(c for c in asked.fragments if self._dealt[c.fragment] == number)
            worker.begin(replace(asked, fragments=own))
        restored = [worker.restored(self._patience_s) for worker in self._workers]
        fragments = sorted(
            (fragment for one in restored for fragment in one.fragments),
            key=lambda fragment: fragment.fragment,
        )
        self._lost = {
            number: tuple(f.fragment for f in one.lost)
            for number, one in enumerate(restored)
            if one.lost
        }
        for fragment in fragments:
            self._hearing.digests[fragment.fragment] = fragment.digest
        return FragmentsRestored(
            fragments=tuple(fragments),
            lost=tuple(f for one in restored for f in one.lost),
            discarded=sum(one.discarded for one in restored),
            environment=restored[0].environment,
        )

    def keep_house(self, now: float) -> None:
        """Do nothing: workers write the snapshots that are due themselves."""

    def wait(self, patience_s: Callable[[], float]) -> bool:
        """Return True: workers wait for the snapshots under way in `save_all`."""
        return True

    def save_all(self, within_s: float | None) -> bool:
        """Have every worker write its last snapshots; wait for it as long as it lives.
        What a worker does not write it applies from its publishes as it starts again.
        At the end of the run, copy them here from other machines, and return False if
        one is not here."""
        for worker in self._workers:
            worker.send(SaveAll(within_s=within_s))
        whole = []
        for worker in self._workers:
            saved = worker.saved()
            if saved is None or saved.text:
                why = "it is away" if saved is None else saved.text
                logger.error("%s wrote no last snapshot: %s", worker.name, why)
            else:
                whole.append(worker)
            if saved is not None:
                for fragment, digest in saved.digests.items():
                    self._hearing.digests[fragment] = digest
                self._missing |= set(worker.fragments) - set(saved.digests)
        if self._missing:
            logger.error(
                "fragments %s are lost with their worker's disk, and no island gave "
                "them back: the result lacks them; see kept cycles",
                sorted(self._missing),
            )
        if within_s is None:
            # Workers on other machines stay until this machine has all of the result.
            here = [worker for worker in whole if self._bring_home(worker)]
            self._over = len(here) == len(self._workers)
            if not self._over:
                logger.error(
                    "the result lacks fragments of %s; start the coordinator again, "
                    "and they come",
                    ", ".join(w.name for w in self._workers if w not in here),
                )
        return within_s is not None or self._over

    def _bring_home(self, worker: Supervised) -> bool:
        """Copy the last snapshots of a worker on another machine to this one; tell
        whether they are here."""
        if (there := worker.elsewhere) is not None:
            try:
                for fragment in worker.fragments:
                    if fragment not in self._missing:
                        there.bring_home(fragment)
            except (WireError, OSError) as error:
                logger.error(
                    "fragments of %s are on its machine alone: %s", worker.name, error
                )
                return False
        return True

    def end(self, within_s: float) -> None:
        """End all workers; kill those that have not ended in time."""
        self._hearing.release()
        for worker in self._workers:
            worker.end(over=self._over)
        deadline = time.monotonic() + within_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def alerts(self, now: float) -> list[str]:
        """Return what people should know about snapshots."""
        return [alert for worker in self._workers for alert in worker.alerts]

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments, as last heard."""
        return digest_all(self._hearing.digests)

    # ---- islands' bytes: not here ---------------------------------------------------

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        """Raise the error that sends the island to its fragment's worker, of which it
        has not heard yet.
        """
        raise self._elsewhere(start.fragment)

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """See `upload_begin`."""
        raise self._elsewhere(start.fragment)

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        """See `upload_begin`."""
        raise self._elsewhere(request.fragment)

    def _elsewhere(self, fragment: int) -> Busy:
        worker = self._dealt[fragment]
        return Busy(
            f"fragment {fragment} is at worker {worker}, "
            f"{self._workers[worker].address}; connect to it"
        )
