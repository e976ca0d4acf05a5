"""Hold fragments in worker processes, here or elsewhere, which end with their lead.

To the lead this is one holder: each message goes to the worker that has its fragment.
The first line that breaks ends the lead; whoever started it starts it again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from diloco_jax import checkpoint, run_files
from diloco_jax.config import Config
from diloco_jax.coordinator.holding.anchors import layouts_of, values_of
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    make_store,
)
from diloco_jax.coordinator.kept import KeptCycles, telling
from diloco_jax.coordinator.workers.led import LedWorker, Shown
from diloco_jax.core.fragments import FragmentPlan, digest_all, digest_arrays
from diloco_jax.files import is_bucket, write_json
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.holding import (
    AllSaved,
    AnchorKept,
    AwaitTake,
    BeginWorker,
    Drop,
    Forget,
    FragmentsRestored,
    FromHolder,
    KeepFragment,
    LetGo,
    MergeDigested,
    MergesCompiled,
    RestoredFragment,
    RestoreFragments,
    SaveAll,
    ToHolder,
    deal,
    next_start,
)
from diloco_jax.protocol.messages import (
    FromCoordinator,
    Hello,
    ResendRequest,
    TakeRequest,
    Welcome,
)
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.wire import addresses, bulk
from diloco_jax.wire.bulk import FetchSource
from diloco_jax.wire.errors import Busy, WireError

logger = logging.getLogger(__name__)

Tell = Callable[[FromHolder], None]


class WorkersHolder:
    """The `Holder` of a lead whose fragments are in `placement.workers` processes."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        run_id: str,
        plan: FragmentPlan,
        kept: KeptCycles,
        term: int,
        *,
        over: bool = False,
    ) -> None:
        """kept: makes cycles of what workers kept. term: the run's. over: it is over;
        see `has_result`. No process is started before `restore`."""
        count = config.placement.workers
        self._config, self._workdir, self._plan = config, workdir, plan
        self._kept, self._over = kept, over
        self._dealt = deal(plan.sizes, count)
        self.digests = [""] * len(self._dealt)
        """Digest of each fragment's Theta, as last heard."""
        self._uncompiled = set(range(count))
        """Workers that have not said that they have compiled."""
        self._lock, self._begun = threading.Lock(), threading.Event()
        # Layouts and shapes, without arrays.
        self._store, self._layouts = (
            make_store(config, plan, None),
            layouts_of(plan.fragments),
        )
        self._whose = checkpoint.whose(config.run, run_id, plan)
        self._tell: Tell = lambda _: None
        self._failed: Callable[[BaseException], None] = lambda _: None
        start = _next_start(workdir)
        fields = dataclasses.asdict(config)
        self._workers = [
            LedWorker(
                BeginWorker(
                    config=fields,
                    workdir=str(workdir.absolute()),
                    run_id=run_id,
                    worker=number,
                    fragments=self.of(number),
                    bind=addresses.worker_address(config.placement.bind, number),
                    term=term,
                    start=start,
                ),
                config,
                functools.partial(self._hear, number),
                self._fail,
            )
            for number in range(count)
        ]

    def of(self, worker: int) -> tuple[int, ...]:
        """Return the fragments of a worker."""
        return tuple(f for f, own in enumerate(self._dealt) if own == worker)

    def completed(self, hello: Hello, message: FromCoordinator) -> FromCoordinator:
        """Complete a Welcome with the addresses at which workers serve, for the island
        that said hello; tell the worker first which delta the island is asked for."""
        match message:
            case Welcome():
                at = tuple(worker.address for worker in self._workers)
                return replace(message, workers=at)
            case TakeRequest() | ResendRequest():
                delta = DeltaKey(
                    hello.island, hello.incarnation, message.fragment, message.tick
                )
                self._of(message.fragment).send(AwaitTake(delta=delta))
        return message

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

        failed: called with the error of a worker whose line broke.
        """
        self._tell, self._failed = tell, failed
        self._begun.set()

    def hold(self, message: ToHolder) -> None:
        """Pass a message to its fragment's worker; see `engine.Holder`."""
        match message:
            case Forget():
                for worker in self._workers:
                    worker.send(message)
            case Drop():
                self._of(message.delta.fragment).send(message)
            case KeepFragment():
                self._of(message.fragment).send(message)
                theta = functools.partial(self._fetch_kept, message)
                self._kept.keep(message, theta, telling(self._tell))
            case _:
                self._of(message.fragment).send(message)

    def warm_up(self) -> None:
        """Do nothing: workers compile as soon as they have their fragments."""

    def close(self) -> None:
        """Do nothing: workers end after `save_all`, by `end`."""

    # ---- what the process around it asks for ----------------------------------------

    def restore(self, asked: RestoreFragments) -> FragmentsRestored:
        """Start or dial the workers; each brings its fragments to what is committed, or
        begins them. Raises ConfigError, Refused or ConnectionLost with the reason of
        the first worker that does not."""
        if self._over:
            return self._as_heard(asked)
        _over_path(self._workdir).unlink(missing_ok=True)
        for number, worker in enumerate(self._workers):
            own = tuple(c for c in asked.fragments if self._dealt[c.fragment] == number)
            worker.start(replace(asked, fragments=own))
        restored = [worker.restored(first=asked.first) for worker in self._workers]
        fragments = [fragment for one in restored for fragment in one.fragments]
        for fragment in fragments:
            self.digests[fragment.fragment] = fragment.digest
        return FragmentsRestored(
            fragments=tuple(sorted(fragments, key=lambda f: f.fragment)),
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
        """Have every worker write its last snapshots. What a worker does not write it
        applies from its publishes as it starts again.

        At the end of the run, fetch them from other machines, then tell all workers
        that it is over; return False if one did not come."""
        if self._over:
            self._tell_over()
            return True
        for worker in self._workers:
            worker.send(SaveAll(within_s=within_s))
        saved = [worker.saved() for worker in self._workers]
        for worker, one in zip(self._workers, saved, strict=True):
            if one is None or one.text:
                why = "the line to it broke" if one is None else one.text
                logger.error("%s wrote no last snapshot: %s", worker.name, why)
            if one is not None:
                for fragment, digest in one.digests.items():
                    self.digests[fragment] = digest
        if within_s is not None:
            return True
        whole = [
            one is not None and self._fetch_last(worker, one)
            for worker, one in zip(self._workers, saved, strict=True)
        ]
        if not all(whole):
            logger.error(
                "the result lacks fragments of %s; start the coordinator again, and "
                "they come",
                ", ".join(
                    worker.name
                    for worker, here in zip(self._workers, whole, strict=True)
                    if not here
                ),
            )
            return False
        _write_over(self._workdir, self.digests, ())
        self._tell_over()
        return True

    def end(self, within_s: float) -> None:
        """End all workers; kill children that have not ended in time."""
        self._begun.set()
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + within_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def alerts(self, now: float) -> list[str]:
        """Return what people should know about snapshots."""
        return [alert for worker in self._workers for alert in worker.alerts]

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments, as last heard."""
        return digest_all(self.digests)

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
        worker = self._of(fragment)
        return Busy(
            f"fragment {fragment} is at {worker.name}, {worker.address}; connect to it"
        )

    # ---- inside ---------------------------------------------------------------------

    def _of(self, fragment: int) -> LedWorker:
        return self._workers[self._dealt[fragment]]

    def _hear(self, worker: int, message: FromHolder) -> None:
        """Pass on what a worker says, on the worker's thread."""
        self._begun.wait()
        match message:
            case MergesCompiled():
                with self._lock:
                    self._uncompiled.discard(worker)
                    if self._uncompiled:
                        return
            case MergeDigested() | AnchorKept():
                self.digests[message.fragment] = message.digest
        self._tell(message)

    def _fail(self, error: BaseException) -> None:
        self._begun.wait()
        self._failed(error)

    def _fetched(self, fragment: int, version: Version) -> dict[str, list[Any]]:
        """Fetch Theta of a fragment; return a snapshot's arrays, without momentum.
        Raises WireError."""
        layout = self._layouts[fragment]
        found = self._of(fragment).fetch(fragment, version, layout.total_bytes)
        return self._store.first(fragment, values_of(layout, found))

    def _fetch_kept(self, keep: KeepFragment) -> list[Any]:
        """Fetch a fragment that its worker keeps for a cycle. Raises WireError."""
        try:
            return self._fetched(keep.fragment, keep.version)["theta"]
        finally:
            self._of(keep.fragment).send(LetGo(fragment=keep.fragment))

    def _fetch_last(self, worker: LedWorker, saved: AllSaved) -> bool:
        """Fetch the last snapshots of a worker on another machine; tell whether all
        that it has is here. The outer momentum stays there."""
        if lost := sorted(set(worker.fragments) - set(saved.digests)):
            logger.error(
                "fragments %s are lost with the disk of %s, and no island gave them "
                "back: the result lacks them; see kept cycles",
                lost,
                worker.name,
            )
        placement = self._config.placement
        folder = checkpoint.snapshots_folder(placement, self._workdir)
        if not saved.digests or not worker.dialled or is_bucket(str(folder)):
            return True
        snapshots = FragmentSnapshots(
            folder, placement, tuple(saved.digests), self._whose
        )
        try:
            for fragment, digest in saved.digests.items():
                version = saved.versions[fragment]
                arrays = self._fetched(fragment, version)
                if (found := digest_arrays(arrays["theta"])) != digest:
                    raise OSError(
                        f"fragment {fragment} came with digest {found}, and its worker "
                        f"has {digest}"
                    )
                snapshots.save_first(fragment, version, arrays)
                arrays.clear()
                give_memory_back()
        except (WireError, OSError) as error:
            logger.error("fragments are at %s alone: %s", worker.name, error)
            return False
        return True

    def _as_heard(self, asked: RestoreFragments) -> FragmentsRestored:
        """Answer for workers that have ended with the run."""
        self.digests = [str(d) for d in _over(self._workdir)["digests"]]
        return FragmentsRestored(
            fragments=tuple(
                RestoredFragment(
                    fragment=c.fragment,
                    snapshot=c.version,
                    moved=False,
                    digest=self.digests[c.fragment],
                )
                for c in asked.fragments
                if self.digests[c.fragment]
            ),
            discarded=0,
            environment=self._store.describe(),
        )

    def _tell_over(self) -> None:
        """Tell all workers that the run is over, but those that know it."""
        heard = set(_over(self._workdir)["heard"])
        for number, worker in enumerate(self._workers):
            if number in heard or (self._over and not worker.dialled):
                continue
            if worker.tell_over():
                heard.add(number)
                _write_over(self._workdir, self.digests, sorted(heard))
            else:
                logger.error(
                    "%s cannot be told that the run is over; end `diloco worker` "
                    "there, if it does not end by itself",
                    worker.name,
                )


def has_result(workdir: Path) -> bool:
    """Tell whether this machine has the result of workers, which may have ended."""
    return _over_path(workdir).is_file()


def _over_path(workdir: Path) -> Path:
    return workdir / run_files.WORKERS / "over.json"


def _over(workdir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_over_path(workdir).read_bytes())
    return found


def _write_over(workdir: Path, digests: Sequence[str], heard: Sequence[int]) -> None:
    """Keep that the result is here, and which workers have heard so."""
    facts = {"digests": list(digests), "heard": list(heard)}
    write_json(facts, _over_path(workdir))


def _next_start(workdir: Path) -> int:
    """Return the number of this start of the lead, and keep it: no other may be started
    at the same time (`run_files.LOCK`)."""
    folder = workdir / run_files.WORKERS
    folder.mkdir(exist_ok=True)
    path = folder / "lead.json"
    last = 0
    if path.is_file():
        last = int(json.loads(path.read_bytes())["start"])
    number = next_start(last, time.time())
    write_json({"start": number}, path)
    return number
