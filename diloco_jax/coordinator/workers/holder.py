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
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diloco_jax.config import Config
from diloco_jax.coordinator.kept import KeptCycles, telling
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.supervised import Heard, Shown, Supervised
from diloco_jax.core.fragments import digest_all
from diloco_jax.protocol import tickets
from diloco_jax.protocol.coordinator.events import (
    AnchorWaits,
    WorkerAway,
    WorkerBack,
)
from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.holding import (
    AnchorKept,
    Committed,
    Drop,
    Forget,
    FragmentsRestored,
    FromHolder,
    MergeDigested,
    MergesCompiled,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.messages import FromCoordinator, Hello, Welcome
from diloco_jax.protocol.outposts import first_number
from diloco_jax.protocol.values import Version
from diloco_jax.protocol.working import (
    BeginWorker,
    FragmentKept,
    FragmentSaved,
    SaveAll,
)
from diloco_jax.wire import addresses, bulk
from diloco_jax.wire.errors import Busy, WireError
from diloco_jax.wire.sources import FetchSource

logger = logging.getLogger(__name__)

Tell = Callable[[FromHolder | AnchorWaits | WorkerAway | WorkerBack], None]
OnDisk = Callable[[Heard, Callable[[], None], Callable[[], None]], None]


class WorkersHolder:
    """The `Holder` of a lead whose fragments are in `placement.workers` processes."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        run_id: str,
        sizes: tuple[int, ...],
        kept: KeptCycles,
        on_disk: OnDisk,
        reign: int = 1,
    ) -> None:
        """sizes: parameters by fragment. kept: makes cycles of what workers write.
        on_disk: called with a worker's message, what tells the lead of it, and what
        tells the lead first that it takes a while; it has a standby sent the file of
        which the message speaks. reign: see `Unseated.reign`. No process is started
        before `restore`."""
        self._kept, self._on_disk = kept, on_disk
        count = config.placement.workers
        self._lives = [0] * count
        """How often each worker went away."""
        self._dealt = deal(sizes, count)
        self._digests = [""] * len(sizes)
        self._missing: set[int] = set()
        """Fragments that their workers do not have as the run ends."""
        self._run_id, self._key = run_id, secrets.token_bytes(tickets.KEY_BYTES)
        # Longer than an island waits for the coordinator, or takes to join.
        deadlines = config.placement.deadlines
        self._ticket_s = config.placement.alone_s + deadlines.join_s(4 * sum(sizes))
        self._lost: dict[int, tuple[int, ...]] = {}
        """Fragments that workers had lost at the start."""
        self._told = threading.Event()
        self._uncompiled = count
        self._lock = threading.Lock()
        self._patience_s = config.placement.outage_budget_s
        at_least = 1
        if config.placement.worker_addresses:
            at_least = first_number(reign, time.time())
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
                self._hear,
                self._fail,
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
        # By the machine's own clock, which does not jump.
        until = time.monotonic() + self._ticket_s
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
        self._tell, self._failed = tell, failed
        for worker, lost in self._lost.items():
            tell(WorkerBack(worker=worker, lost=lost))
        self._told.set()

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
            self._digests[fragment.fragment] = fragment.digest
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
                    self._digests[fragment] = digest
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
        self._told.set()
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
        return digest_all(self._digests)

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

    def _hear(self, message: Heard) -> None:
        """Pass on what a worker says, on its thread."""
        self._told.wait()
        if isinstance(message, WorkerAway):
            self._lives[message.worker] += 1
        life = self._life_of(message)
        # First: the file has to go ahead of the record that the lead writes of it.
        self._on_disk(
            message,
            lambda: self._pass_on(message, life),
            lambda: self._tell_waits(message),
        )

    def _life_of(self, message: Heard) -> int:
        """Return the life of the worker that says this, if it may be told late."""
        if not isinstance(message, AnchorKept):
            return 0
        return self._lives[self._dealt[message.fragment]]

    def _tell_waits(self, message: Heard) -> None:
        assert isinstance(message, AnchorKept)
        waits = AnchorWaits(
            fragment=message.fragment,
            island=message.island,
            incarnation=message.incarnation,
        )
        self._tell(waits)

    def _pass_on(self, message: Heard, life: int) -> None:
        """Tell the lead, unless the worker that had this has gone away since."""
        if life != self._life_of(message):
            return None
        match message:
            case FragmentSaved():
                return None
            case FragmentKept(keep=keep, trouble=trouble):
                there = self._workers[self._dealt[keep.fragment]].elsewhere
                fetch = there.fetch_kept if there is not None else None
                done = telling(self._tell)
                return self._kept.written(keep, trouble, done, fetch)
            case MergesCompiled():
                with self._lock:
                    self._uncompiled -= 1
                    if self._uncompiled:  # All at a start; each one that came back.
                        return None
                    self._uncompiled = 1
            case MergeDigested() | AnchorKept():
                self._digests[message.fragment] = message.digest
        return self._tell(message)

    def _fail(self, error: BaseException) -> None:
        self._told.wait()
        self._failed(error)
