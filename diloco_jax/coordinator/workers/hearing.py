"""Hear what workers say, and tell the lead of it: each on the thread of its worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from diloco_jax.coordinator.kept import KeptCycles, telling
from diloco_jax.coordinator.workers.outpost.dialing import Elsewhere
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import (
    AnchorKept,
    FragmentKept,
    FromHolder,
    MergeDigested,
    MergesCompiled,
)

Tell = Callable[[FromHolder | WorkerAway | WorkerBack], None]


class Hearing:
    """Passes on the messages of all workers. They wait until `begin` or `release`."""

    def __init__(
        self,
        dealt: Sequence[int],
        workers: int,
        kept: KeptCycles,
        elsewhere: Callable[[int], Elsewhere | None],
    ) -> None:
        """dealt: the worker of each fragment. workers: how many there are. kept: makes
        cycles of what they write. elsewhere: returns a worker's place, if that is
        another machine."""
        self._dealt, self._elsewhere, self._kept = dealt, elsewhere, kept
        self.digests = [""] * len(dealt)
        """Digest of each fragment's Theta, as last heard."""
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
        if isinstance(message, MergesCompiled) and not self._have_compiled(worker):
            return
        match message:
            case FragmentKept(keep=keep, trouble=trouble):
                there = self._elsewhere(self._dealt[keep.fragment])
                fetch = there.fetch_kept if there is not None else None
                self._kept.written(keep, trouble, telling(self._tell), fetch)
                return
            case MergeDigested() | AnchorKept():
                self.digests[message.fragment] = message.digest
        self._tell(message)

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
