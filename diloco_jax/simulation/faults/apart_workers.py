"""Workers on machines of their own in a world of faults: they outlive leads.

What a worker decides as another lead comes is the product's: which merges are given up
(`MergesUnderWay`), whether it can go on (`alive`), and what it says to the
next lead (`OF_ONE_LEAD`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

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
    BeginWorker,
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
    Obeyed,
    RestoredFragment,
    RestoreFragments,
    ToHolder,
)
from diloco_jax.protocol.messages import AnchorRequest
from diloco_jax.protocol.values import DeltaKey, Prepared, Version
from diloco_jax.simulation.faults.arrays import Anchor, Anchors, first_anchors
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.faults.observing import Incarnation
from diloco_jax.simulation.faults.scene import Scene
from diloco_jax.simulation.faults.schedule import LEASE_S, RETRY_S
from diloco_jax.simulation.virtual.arrays import VirtualFetch
from diloco_jax.simulation.virtual.clock import Clock

WORKERS_SILENCE_S = 2 * LEASE_S
"""Silence of its lead after which a worker leaves the line."""
LEADS_SILENCE_S = 3 * LEASE_S
"""Silence of a worker after which the lead leaves the line."""


class Dialler(Protocol):
    """A lead's end of the lines to one worker: see `apart_world.LedWorker`."""

    @property
    def files(self) -> dict[int, Anchor]:
        """Anchors of the beginning of a run or a term, until they are there."""

    def act(self, act: Callable[[], None]) -> None:
        """Do something in the lead's process, if it lives and once it is awake."""

    def wants(self, line: DialledLine) -> bool:
        """Tell whether the lead still waits for the answer to this dial."""

    def hear(self, line: DialledLine, message: FromWorker) -> None:
        """Take a message of the worker."""

    def lose_line(self, line: DialledLine) -> None:
        """Note that a line is gone."""

    def is_refused(self, line: DialledLine) -> None:
        """Note that the worker obeys a later lead."""

    def leads_for(self, coordinator: object) -> bool:
        """Tell whether it is the end of this coordinator."""


class WorkerNetwork:
    """The network between a worker and its lead, for all their lines."""

    def __init__(self, clock: Clock, latency_s: float) -> None:
        self.clock, self.latency_s = clock, latency_s
        self.parted = False
        self.line: DialledLine | None = None
        """The last line over it."""
        self._waiting: list[Callable[[], None]] = []
        self._cuts = 0

    def carry(self, arrive: Callable[[], None]) -> None:
        """Let a message arrive a latency from now, but not before the end of a
        partition."""
        self.clock.after(self.latency_s, lambda: self._land(arrive))

    def heal(self) -> None:
        """End the partition; what waited arrives, in order."""
        self.parted = False
        waiting, self._waiting = self._waiting, []
        for arrive in waiting:
            arrive()

    def _land(self, arrive: Callable[[], None]) -> None:
        if self.parted:
            self._waiting.append(arrive)
        else:
            arrive()

    def cut(self, for_s: float) -> None:
        """Let nothing come through for a while."""
        self.parted = True
        self._cuts += 1
        cut = self._cuts

        def silent(side: Callable[[DialledLine], None]) -> None:
            if self.parted and self._cuts == cut and self.line is not None:
                side(self.line)

        self.clock.after(WORKERS_SILENCE_S, lambda: silent(DialledLine.leave))
        self.clock.after(LEADS_SILENCE_S, lambda: silent(DialledLine.give_up))
        self.clock.after(for_s, self.heal)


class DialledLine:
    """One line from a lead to a worker, from its dial to its end."""

    def __init__(
        self,
        lead: Dialler,
        worker: ApartWorker,
        network: WorkerNetwork,
        begin: BeginWorker,
        asked: RestoreFragments,
    ) -> None:
        self.begin, self.asked, self.files = begin, asked, lead.files
        self._lead, self._worker, self._network = lead, worker, network
        self._open = True
        """At the worker's end."""
        network.line = self

    def dial(self) -> None:
        """Come to the worker's machine, if the lead lives until then."""

        def come() -> None:
            if self._lead.wants(self):
                self._worker.come(self)

        self._network.carry(lambda: self._lead.act(come))

    def tell(self, message: ToHolder) -> None:
        """Send the worker a message."""
        self._network.carry(lambda: self._worker.hear(self, message))

    def say(self, message: FromWorker) -> None:
        """Send the lead a message."""
        if self._open:
            self._carry(lambda: self._lead.hear(self, message))

    def part(self) -> None:
        """Close the worker's end. The lead notices."""
        self._close()
        self._carry(lambda: self._lead.lose_line(self))

    def refuse(self) -> None:
        """Tell the lead that the worker obeys another one."""
        self._close()
        self._carry(lambda: self._lead.is_refused(self))

    def hang_up(self, *, ends: bool) -> None:
        """Close the lead's end. ends: a worker that this lead has is to end."""

        def notice() -> None:
            if ends and self._open and self._worker.line is self:
                self._worker.end_process()
            self._close()

        self._network.carry(notice)

    def give_up(self) -> None:
        """Close the lead's end after silence."""
        self._lead.act(lambda: self._lead.lose_line(self))

    def leave(self) -> None:
        """Close the worker's end, if the worker has it, after silence."""
        if self._worker.line is self:
            self.part()

    def is_of(self, coordinator: object) -> bool:
        """Tell whether it is the line of this coordinator."""
        return self._lead.leads_for(coordinator)

    def _close(self) -> None:
        self._open = False
        self._worker.lose_line(self)

    def _carry(self, arrive: Callable[[], None]) -> None:
        self._network.carry(lambda: self._lead.act(arrive))


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


class WorkerDisk(Disk):
    """Snapshots and publishes of a worker. A person finds a copy of all that was ever
    on it, for runs in which no island has an anchor."""

    def __init__(self, fragments: int) -> None:
        super().__init__()
        self._format(fragments)
        self._copies = {fragment: ({}, {}) for fragment in range(fragments)}

    def prepare(self, fragment: int, version: Version, publish: bytes) -> bool:
        """See Disk."""
        self._copies[fragment][1][version] = publish
        return super().prepare(fragment, version, publish)

    def save_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """See Disk."""
        self._copies[fragment][0][anchor.version] = anchor
        return super().save_fragment(fragment, anchor)

    def begin_fragment(self, fragment: int, anchor: Anchor) -> bool:
        """See Disk."""
        self._copies[fragment][0][anchor.version] = anchor
        return super().begin_fragment(fragment, anchor)


class ApartWorker:
    """One worker. Its outpost lets in the leads that the product's would."""

    def __init__(self, world: Scene, number: int, fragments: tuple[int, ...]) -> None:
        self.world, self.number, self.fragments = world, number, fragments
        self.disk = WorkerDisk(world.config.fragments)
        self.obeyed = Obeyed()
        """On its disk: the line that it obeyed last."""
        self.process: HoldingProcess | None = None
        self.line: DialledLine | None = None
        """The line to the lead that it obeys."""
        self._down_until = 0.0
        self._alone = 0
        """Counts the times at which it had no lead."""

    @property
    def is_down(self) -> bool:
        """True while nobody answers on this machine."""
        return self.world.clock.now < self._down_until

    # ---- leads ----------------------------------------------------------------------

    def come(self, line: DialledLine) -> None:
        """Let a lead in that has dialled, or refuse it."""
        after = None if self.is_down else self.obeyed.after(line.begin)
        if self.is_down:
            line.part()
        elif after is None:
            line.refuse()
        elif not self._has_taken(line):
            line.part()  # The disk is full: files that should be here are not.
        else:
            self.obeyed = after
            before, self.line = self.line, line
            if before is not None:
                before.part()
            if self.process is None:
                self.process = HoldingProcess(self)
                self.process.begin(line)
            else:
                self.process.go_on(line)

    def _has_taken(self, line: DialledLine) -> bool:
        """Take in the files that a lead has of the beginning of a run or a term."""
        return all(
            self.disk.begin_fragment(fragment, line.files[fragment])
            for fragment in self.fragments
            if fragment in line.files
        )

    def hear(self, line: DialledLine, message: ToHolder) -> None:
        """Do what a lead says, if it has the newest line."""
        if line is self.line and self.process is not None:
            self.process.hold(message)

    def lose_line(self, line: DialledLine) -> None:
        """Serve on without a lead, but not for ever."""
        if line is not self.line:
            return
        self.line, process = None, self.process
        if process is None:
            return
        process.leave()
        self._alone += 1
        alone = self._alone

        def end() -> None:
            waits = self.line is None and self._alone == alone
            if waits and self.process is process:
                self.end_process()

        self.world.clock.after(self.world.schedule.outage_s, end)

    # ---- its ends -------------------------------------------------------------------

    def end_process(self) -> None:
        """End the process, whose outpost tells the lead."""
        process, self.process = self.process, None
        if process is not None:
            process.dead = True
            self.world.monitor.worker_died(self.fragments)
        line, self.line = self.line, None
        if line is not None:
            line.part()

    def crash(self, noticed_s: float, down_s: float) -> None:
        """Lose the machine for a while: the lead hears of it `noticed_s` later."""
        self._down_until = self.world.clock.now + noticed_s + down_s
        line, self.line = self.line, None
        if line is not None:
            self.world.clock.after(noticed_s, line.part)
        self.end_process()
