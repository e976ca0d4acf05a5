"""Hear what workers say, and tell the lead of it: each on the thread of its worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from diloco_jax.coordinator.kept import KeptCycles, telling
from diloco_jax.coordinator.workers.outpost.dialing import Elsewhere
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.protocol.coordinator.events import (
    AnchorWaits,
    WorkerAway,
    WorkerBack,
)
from diloco_jax.protocol.holding import (
    AnchorKept,
    FromHolder,
    MergeDigested,
    MergesCompiled,
)
from diloco_jax.protocol.working import FragmentKept, FragmentSaved

Tell = Callable[[FromHolder | AnchorWaits | WorkerAway | WorkerBack], None]
OnDisk = Callable[[Heard, Callable[[], None], Callable[[], None]], None]


class Hearing:
    """Passes on the messages of all workers. They wait until `begin` or `release`."""

    def __init__(
        self,
        dealt: Sequence[int],
        workers: int,
        kept: KeptCycles,
        on_disk: OnDisk,
        elsewhere: Callable[[int], Elsewhere | None],
    ) -> None:
        """dealt: the worker of each fragment. workers: how many there are. kept: makes
        cycles of what they write. on_disk: called with a worker's message, what tells
        the lead of it, and what tells the lead first that it takes a while; it has a
        standby sent the file of which the message speaks. elsewhere: returns a worker's
        place, if that is another machine."""
        self._dealt, self._elsewhere = dealt, elsewhere
        self._kept, self._on_disk = kept, on_disk
        self.digests = [""] * len(dealt)
        """Digest of each fragment's Theta, as last heard."""
        self._lives = [0] * workers
        """How often each worker went away."""
        self._uncompiled = set(range(workers))
        """Workers that have never said that they have compiled."""
        self._lock = threading.Lock()
        self._begun = threading.Event()

    def begin(self, tell: Tell, failed: Callable[[BaseException], None]) -> None:
        """Set the callbacks, of which `failed` is called with the error of a worker
        that is not started again."""
        self._tell, self._failed = tell, failed
        self._begun.set()

    def release(self) -> None:
        """Let no worker's thread wait any more: the run ends."""
        self._begun.set()

    def hear(self, worker: int, message: Heard) -> None:
        """Pass on what a worker says."""
        self._begun.wait()
        if isinstance(message, WorkerAway):
            self._lives[worker] += 1
        if isinstance(message, MergesCompiled) and not self._have_compiled(worker):
            return
        life = self._life_of(message)
        # First: the file has to go ahead of the record that the lead writes of it.
        self._on_disk(
            message,
            lambda: self._pass_on(message, life),
            lambda: self._tell_waits(message),
        )

    def fail(self, error: BaseException) -> None:
        """Pass on the error of a worker that is not started again."""
        self._begun.wait()
        self._failed(error)

    def _have_compiled(self, worker: int) -> bool:
        """Tell whether all have, by the word of this one: at a start it takes all, and
        later each one that came back."""
        with self._lock:
            self._uncompiled.discard(worker)
            return not self._uncompiled

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
                there = self._elsewhere(self._dealt[keep.fragment])
                fetch = there.fetch_kept if there is not None else None
                done = telling(self._tell)
                return self._kept.written(keep, trouble, done, fetch)
            case MergeDigested() | AnchorKept():
                self.digests[message.fragment] = message.digest
        return self._tell(message)
