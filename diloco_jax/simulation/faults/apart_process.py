"""The process of a worker on another machine, in a world of faults: it outlives leads.

What a worker decides as another lead comes is the product's: which merges are given up
(`MergesUnderWay`), whether it can go on (`alive`), and what it says to the
next lead (`OF_ONE_LEAD`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from diloco_jax.coordinator.holding.anchors import WRITE_AGAIN_S
from diloco_jax.coordinator.holding.fragment_snapshots import alive
from diloco_jax.coordinator.holding.holder import MergesUnderWay, PreparedMerge
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.log import DurableError
from diloco_jax.core.fragment_merge import MergeResult
from diloco_jax.protocol.holding import (
    OF_ONE_LEAD,
    AnchorKept,
    AwaitAnchor,
    Commit,
    DeltaArrived,
    Drop,
    Forget,
    FragmentKept,
    FragmentsRestored,
    FromWorker,
    KeepFragment,
    LostFragment,
    Merge,
    MergePrepared,
    RestoredFragment,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.protocol.values import DeltaKey, Prepared, Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors, first_anchors
from diloco_jax.simulation.faults.observing import Incarnation
from diloco_jax.simulation.faults.schedule import RETRY_S
from diloco_jax.simulation.virtual.arrays import VirtualFetch

if TYPE_CHECKING:
    from diloco_jax.simulation.faults.apart_line import DialledLine
    from diloco_jax.simulation.faults.apart_worker import ApartWorker


class HoldingProcess:
    """One life of a worker."""

    def __init__(self, worker: ApartWorker) -> None:
        self._worker, self._world = worker, worker.world
        self.dead = False
        self.anchors = Anchors(first_anchors(self._world.config.fragments))
        self.lost: set[int] = set()
        """Fragments that it does not have."""
        self.deltas: dict[DeltaKey, Any] = {}
        self._under_way = MergesUnderWay()
        self._computes_until = 0.0
        self._fences: dict[str, int] = {}
        """First incarnation of each island that may still send."""
        self._awaited: dict[int, AwaitAnchor] = {}
        self._kept: dict[int, Anchor] = {}
        """Anchors that are on disk and not committed."""
        self._line: DialledLine | None = None
        self._unsaid: list[FromWorker] | None = None
        """Messages that wait until a new lead knows what is here."""

    # ---- leads ----------------------------------------------------------------------

    def begin(self, line: DialledLine) -> None:
        """Restore the fragments from the disk, for the first lead."""
        self._line = line
        found, lost = [], []
        for committed in line.asked.fragments:
            fragment, version = committed.fragment, committed.version
            disk = self._worker.disk
            if disk.restore_fragment(self.anchors, fragment, version):
                found.append(self._restored(fragment, version))
            else:
                lost.append(LostFragment(fragment=fragment, why="its disk"))
        self.lost = {one.fragment for one in lost}
        self._fence(line.asked)
        line.say(_answer(found, lost))

    def go_on(self, line: DialledLine) -> None:
        """Obey another lead. It is answered once nothing is computed any more."""
        self._line, self._unsaid = line, []
        at = max(self._computes_until, self._world.clock.now)
        self._world.clock.at(at, lambda: self._take_over(line))

    def leave(self) -> None:
        """Have no lead."""
        self._line = None

    def _take_over(self, line: DialledLine) -> None:
        if self.dead or self._line is not line:
            return
        try:
            self._restore_alive(line)
        except DurableError:
            self._worker.end_process()  # The next one restores it from disk.

    def _restore_alive(self, line: DialledLine) -> None:
        self._fence(line.asked)
        versions = {c.fragment: c.version for c in line.asked.fragments}
        for fragment in self._under_way.give_up(versions, 0.0):
            self._commit(Commit(fragment=fragment, version=versions[fragment]))
        self._begin_anew(versions)
        lost = [LostFragment(fragment=f, why="as before") for f in sorted(self.lost)]
        found = list(alive(line.asked, cast(Store, self), self.lost))
        for fragment, version in versions.items():
            self._worker.disk.discard(fragment, version)
        line.say(_answer(found, lost))
        unsaid, self._unsaid = self._unsaid, None
        for message in unsaid or []:
            if not isinstance(message, OF_ONE_LEAD):
                line.say(message)
        for key, delta in list(self.deltas.items()):
            _, refusal, norm = self.anchors.receive(key, delta)
            line.say(DeltaArrived(**key._asdict(), refusal=refusal, norm=norm))

    def _begin_anew(self, versions: dict[int, Version]) -> None:
        """Make the anchors visible that were committed; see `LostFragments`."""
        for fragment in sorted(self.lost):
            kept = self._kept.get(fragment)
            if kept is not None and kept.version == versions[fragment]:
                self._begin_term(fragment)
            self._awaited.pop(fragment, None)
            self._kept.pop(fragment, None)

    def _fence(self, asked: RestoreFragments) -> None:
        for fence in asked.fences:
            self._forget(fence)

    def _say(self, message: FromWorker) -> None:
        if self._unsaid is not None:
            self._unsaid.append(message)
        elif self._line is not None:
            self._line.say(message)

    # ---- as the store of `alive` ----------------------------------------------------

    def current(self, fragment: int) -> tuple[Version, None]:
        """See `Store.current`."""
        return self.anchors.anchors[fragment].version, None

    def digest_of(self, fragment: int) -> str:
        """See `Store.digest_of`."""
        return self.anchors.anchors[fragment].value.hex()

    def _restored(self, fragment: int, version: Version) -> RestoredFragment:
        return RestoredFragment(
            fragment=fragment,
            snapshot=version,
            moved=False,
            digest=self.digest_of(fragment),
        )

    # ---- what a lead says -----------------------------------------------------------

    def hold(self, message: ToHolder) -> None:
        """Do what the lead says."""
        match message:
            case Merge():
                self._merge(message)
            case Commit(fragment=fragment):
                if fragment in self.lost:
                    self._begin_term(fragment)
                else:
                    self._commit(message)
                self._world.monitor.published(fragment, self.anchors.anchors[fragment])
            case AwaitAnchor(fragment=fragment):
                self._awaited[fragment] = message
            case KeepFragment():
                self._say(FragmentKept(keep=message))
            case Drop():
                self.deltas.pop(message.delta, None)
            case Forget():
                self._forget(message)

    def _merge(self, merge: Merge) -> None:
        deltas = [self.deltas[key] for key in merge.deltas]
        self._under_way.order(merge, lambda: None)()
        prepared = self.anchors.compute(merge, deltas)
        publish = self.anchors.publish(merge.fragment)
        due = self._world.clock.after(
            self._world.schedule.merge_s,
            lambda: self._prepare(merge, prepared, publish),
        )
        self._computes_until = max(self._computes_until, due.at)

    def _prepare(self, merge: Merge, prepared: Prepared, publish: bytes) -> None:
        """Write the publish and say so; try again if the disk is full."""
        if self.dead or not self._under_way.is_wanted(merge):
            return
        fragment, version = merge.fragment, merge.version
        if not self._worker.disk.prepare(fragment, version, publish):
            again = functools.partial(self._prepare, merge, prepared, publish)
            self._world.clock.after(WRITE_AGAIN_S, again)
            return
        self._world.monitor.prepared(fragment, version, prepared.digest)
        merged = cast(MergeResult, publish)
        self._under_way.prepared(PreparedMerge(merge, merged, 0.0))
        self._say(MergePrepared(fragment=fragment, version=version, prepared=prepared))

    def _commit(self, commit: Commit) -> None:
        fragment, version = commit.fragment, commit.version
        prepared = self._under_way.pop(fragment)
        self.anchors.replay(fragment, version, cast(bytes, prepared.merged))
        for key in prepared.merge.deltas:
            self.deltas.pop(key, None)

    def _begin_term(self, fragment: int) -> None:
        """Swap a kept anchor in."""
        self.anchors.load(fragment, self._kept.pop(fragment))
        self._awaited.pop(fragment, None)
        self.lost.discard(fragment)

    def _forget(self, forget: Forget) -> None:
        before = max(forget.before, self._fences.get(forget.island, 0))
        self._fences[forget.island] = before
        for key in [key for key in self.deltas if key.island == forget.island]:
            if key.incarnation < forget.before and key not in forget.kept:
                del self.deltas[key]

    # ---- islands' bytes -------------------------------------------------------------

    def upload(self, key: DeltaKey, encoded: Any) -> None:
        """Take in a delta; whoever leads, or led last, had asked for it."""
        fenced = key.incarnation < self._fences.get(key.island, 0)
        if self.dead or fenced or key.fragment in self.lost or key in self.deltas:
            return
        delta, refusal, norm = self.anchors.receive(key, encoded)
        self.deltas[key] = delta
        self._world.monitor.arrived(key)
        self._say(DeltaArrived(**key._asdict(), refusal=refusal, norm=norm))

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """Return the newest version of a fragment; None if it is not here yet."""
        if fragment in self.lost or self.anchors.anchors[fragment].version < want:
            return None
        return self.anchors.fetch(fragment, want, have)

    def anchor(
        self,
        who: Incarnation,
        asked: AnchorRequest,
        anchor: Anchor,
        wanted: Callable[[], bool],
    ) -> None:
        """Take in the anchor of a lost fragment; see `FaultyCoordinator.anchor`."""
        fragment, world = asked.fragment, self._world
        if self.dead or fragment not in self.lost:
            return
        again = functools.partial(self.anchor, who, asked, anchor, wanted)
        awaited = self._awaited.get(fragment)
        if awaited is None or (awaited.island, awaited.incarnation, awaited.term) != (
            *who,
            asked.term,
        ):
            world.clock.after(RETRY_S, lambda: again() if wanted() else None)
            return
        first = anchor._replace(version=Version(asked.term, anchor.version.number))
        if not self._worker.disk.begin_fragment(fragment, first):
            world.clock.after(WRITE_AGAIN_S, again)
            return
        self._kept[fragment] = first
        digest = first.value.hex()
        world.monitor.worker_back([fragment])
        world.monitor.prepared(fragment, first.version, digest)
        self._say(
            AnchorKept(
                fragment=fragment,
                island=who[0],
                incarnation=who[1],
                replaced=anchor.version,
                version=first.version,
                digest=digest,
            )
        )


def _answer(
    found: list[RestoredFragment], lost: list[LostFragment]
) -> FragmentsRestored:
    return FragmentsRestored(
        fragments=tuple(found), lost=tuple(lost), discarded=0, environment={}
    )
