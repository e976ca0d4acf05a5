"""The coordinator in virtual time: the production engine, driven by a clock.

The threads, disks and sockets of the service are replaced by calls that happen at once
or after a given delay. A `World` has its lives, and islands on lines to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from diloco_jax.config import RunConfig
from diloco_jax.coordinator.holding.fragment_snapshots import WRITE_AGAIN_S
from diloco_jax.coordinator.lead import Decide, Engine, Sessions
from diloco_jax.protocol.coordinator import decide, recovery, takes
from diloco_jax.protocol.coordinator.state import (
    Disconnected,
    Event,
    Ignored,
    PolicyConfig,
    RunResumed,
    State,
    Timer,
    initial,
)
from diloco_jax.protocol.holding import (
    Commit,
    CycleKept,
    DeltaArrived,
    Drop,
    Forget,
    KeepFragment,
    Merge,
    MergePrepared,
    ToHolder,
)
from diloco_jax.protocol.messages import DeltaKey, Hello, Prepared, Refusal, Version
from diloco_jax.protocol.records import Durable, Merged, Noted
from diloco_jax.simulation.clock import Clock, Line, LineSpeed, WakeUp
from diloco_jax.simulation.island import (
    Body,
    Connection,
    IslandSpec,
    NoBody,
    VirtualFetch,
    VirtualIsland,
)


class Received(NamedTuple):
    """A delta as merges need it; and, as in `DeltaArrived`, why it is unfit, or "", its
    length, if known, and its use of rows."""

    delta: Any
    refusal: Refusal = ""
    norm: float = 0.0
    used: int = 0
    uses: str = ""


class Merging(Protocol):
    """Arrays of the coordinator."""

    def receive(self, key: DeltaKey, encoded: Any) -> Received:
        """Take in a delta that arrived."""

    def compute(self, merge: Merge, deltas: Sequence[Any]) -> Prepared:
        """Compute a merge and keep it; return its digest and length once it is
        prepared.
        """

    def commit(self, fragment: int, version: Version) -> None:
        """Make the computed merge the current version."""

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        """Return the publishes from `have` to `want`, or the newest version in full."""


class NoArrays:
    """Merges without arrays; only versions and bytes.

    bytes_down: bytes of an encoded publish, by fragment.
    bytes_full: bytes of an anchor in full, by fragment.
    """

    def __init__(self, bytes_down: tuple[int, ...], bytes_full: tuple[int, ...]):
        self._bytes_down, self._bytes_full = bytes_down, bytes_full

    def receive(self, key: DeltaKey, encoded: Any) -> Received:
        return Received(None)

    def compute(self, merge: Merge, deltas: Sequence[Any]) -> Prepared:
        return Prepared(digest="", payload_bytes=self._bytes_down[merge.fragment])

    def commit(self, fragment: int, version: Version) -> None: ...

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        if have is None or have.term != want.term:
            return VirtualFetch(want, self._bytes_full[fragment], None)
        behind = want.number - have.number
        return VirtualFetch(want, behind * self._bytes_down[fragment], None)


S = TypeVar("S")
E = TypeVar("E")


class VirtualEngine(Engine[S, E]):
    """An engine that hears of events as they come, and of its next deadline.

    clock_offset: seconds by which its own clock is ahead of virtual time.
    """

    def __init__(
        self,
        clock: Clock,
        decide: Decide[S, E],
        next_deadline: Callable[[S, float], float | None],
        config: PolicyConfig,
        state: S,
        clock_offset: float = 0.0,
        **shell: Any,
    ) -> None:
        """shell: see `Engine`."""
        self._sessions = Sessions()
        super().__init__(decide, config, state, sessions=self._sessions, **shell)
        self.clock, self.clock_offset = clock, clock_offset
        self._next_deadline = next_deadline
        self._timer = WakeUp(clock, lambda: self.hear(Timer()))

    @property
    def now(self) -> float:
        """Reading of its own clock."""
        return self.clock.now + self.clock_offset

    def die(self) -> None:
        """End this life: nothing that it began happens any more."""
        self.dead = True
        self._timer.cancel()

    def hello(self, hello: Hello, peer: Connection) -> None:
        """Judge an island on a new connection."""
        self._sessions.arrived(peer)
        self.hear(hello)

    def disconnected(self, peer: Connection) -> None:
        """Note that a connection broke and this end noticed."""
        if self._sessions.gone(peer):
            hello = peer.hello
            self.hear(Disconnected(island=hello.island, session=hello.session))

    def hear(self, event: Any) -> None:
        """Handle one event now."""
        if self.dead:
            return
        self.step(event, self.now)
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the next deadline."""
        deadline = None if self.dead else self._next_deadline(self.state, self.now)
        if deadline is None or deadline == math.inf:
            return
        at = deadline - self.clock_offset
        if at + self.clock_offset < deadline:
            # It is rounded down, so it would ring before its time, again and again.
            at += math.ulp(at) + math.ulp(deadline)
        self._timer.by(max(at, self.clock.now))


class VirtualCoordinator(VirtualEngine[State, Event]):
    """One life of a coordinator, from `state` on; also the `Holder` and the `Log` of
    its engine. There is no tape.

    persist: called with every durable record, before the next effect.
    alert: called with texts that a person should look at.
    merge_seconds: seconds from the order of a merge to its result.
    written: writes the publish of a computed merge to disk; False if the disk is full.
    """

    serves: ClassVar[bool] = True

    def __init__(
        self,
        config: PolicyConfig,
        clock: Clock,
        state: State,
        merging: Merging,
        persist: Callable[[Durable], None] = lambda record: None,
        alert: Callable[[str], None] = lambda text: None,
        merge_seconds: Callable[[Merge], float] = lambda merge: 0.0,
        clock_offset: float = 0.0,
        written: Callable[[Merge, Prepared], bool] = lambda merge, prepared: True,
    ) -> None:
        super().__init__(
            clock,
            decide.step,
            decide.next_deadline,
            config,
            state,
            clock_offset,
            log=self,
            holder=self,
        )
        self.merging, self._merge_seconds = merging, merge_seconds
        self._persist, self._alert, self._written = persist, alert, written
        self._deltas: dict[DeltaKey, Any] = {}
        self._prepared: dict[int, Merge] = {}
        """Merges that are ordered and not committed, by fragment."""
        self.dead_fragments: set[int] = set()
        """Fragments whose worker is dead."""
        self._unkept = 0
        """Fragments that the cycle being kept lacks."""

    @property
    def finished(self) -> bool:
        """True if the run is over."""
        return self.state.phase == "done"

    # ---- what comes in --------------------------------------------------------------

    def arrived(self, key: DeltaKey, encoded: Any) -> None:
        """Take in a delta, all of whose bytes have arrived."""
        fragment = self.state.fragments[key.fragment]
        if key.fragment in self.dead_fragments:
            return
        if not takes.is_awaited(fragment, key.island, key.incarnation, key.tick):
            return
        found = self.merging.receive(key, encoded)._asdict()
        self._deltas[key] = found.pop("delta")
        self.hear(DeltaArrived(**key._asdict(), **found))

    def fetch(
        self, fragment: int, want: Version, have: Version | None
    ) -> VirtualFetch | None:
        """Return the newest version of a fragment; None if its worker is away."""
        if fragment in self.dead_fragments:
            return None
        version = self.state.fragments[fragment].version
        return self.merging.fetch(fragment, version, have)

    def lose(self, fragments: Iterable[int]) -> None:
        """Lose what the worker of these fragments had, which died."""
        self.dead_fragments |= set(fragments)
        for fragment in fragments:
            self._prepared.pop(fragment, None)
        for key in [k for k in self._deltas if k.fragment in self.dead_fragments]:
            del self._deltas[key]

    # ---- as a log -------------------------------------------------------------------

    def persist(self, record: Durable) -> None:
        self._persist(record)

    def note(self, record: Noted) -> None: ...

    def ignored(self, ignored: Ignored) -> None: ...

    def alert(self, text: str, island: str = "") -> None:
        self._alert(text)

    # ---- as a holder ----------------------------------------------------------------

    def hold(self, message: ToHolder) -> None:
        match message:
            case Merge() | Commit() | KeepFragment() if (
                message.fragment in self.dead_fragments
            ):
                pass  # Its worker hears nothing.
            case Merge():
                self._merge(message)
            case Commit():
                self._commit(message)
            case KeepFragment():
                self._keep(message)
            case Drop():
                self._deltas.pop(message.delta, None)
            case Forget():
                self._forget(message)

    def _merge(self, merge: Merge) -> None:
        """Compute at once: the deltas may be dropped before the result is due."""
        deltas = [self._deltas[key] for key in merge.deltas]
        prepared = self.merging.compute(merge, deltas)
        self._prepared[merge.fragment] = merge
        self.clock.after(
            self._merge_seconds(merge), lambda: self._prepare(merge, prepared)
        )

    def _commit(self, commit: Commit) -> None:
        merge = self._prepared.pop(commit.fragment)
        self.merging.commit(commit.fragment, commit.version)
        for key in merge.deltas:
            self._deltas.pop(key, None)

    def _keep(self, keep: KeepFragment) -> None:
        self._unkept = self._unkept or self.config.fragments
        self._unkept -= 1
        if not self._unkept:
            kept = CycleKept(cycle=keep.cycle)
            self.clock.after(0.0, lambda: self.hear(kept))

    def _forget(self, forget: Forget) -> None:
        for key in [key for key in self._deltas if key.island == forget.island]:
            if key.incarnation < forget.before and key not in forget.kept:
                del self._deltas[key]

    def _prepare(self, merge: Merge, prepared: Prepared) -> None:
        """Write the publish and say so; try again if the disk is full."""
        if self.dead or self._prepared.get(merge.fragment) is not merge:
            return
        if not self._written(merge, prepared):
            self.clock.after(WRITE_AGAIN_S, lambda: self._prepare(merge, prepared))
            return
        event = MergePrepared(
            fragment=merge.fragment, version=merge.version, prepared=prepared
        )
        self.hear(event)


class World:
    """A run whose connections never fail; islands come and go.

    make_body: makes the body of an incarnation of the named island.
    alert: see `VirtualCoordinator`.
    report_s: longest time in seconds between two reports of an island.
    outages: seconds for which the coordinator is away, by the number of merges after
      which it dies, before an island is told of the last one. It comes back with what
      its records say; merges that it had begun are lost. A fault while it is away
      meets nobody.
    before: records of a run that was stopped after the last of them and goes on here,
      and its seconds by then; none = a new run.
    """

    def __init__(
        self,
        run: RunConfig,
        config: PolicyConfig,
        merging: Merging,
        *,
        report_s: float,
        line_speed: LineSpeed | None = None,
        make_body: Callable[[str], Body] = lambda name: NoBody(),
        alert: Callable[[str], None] = lambda text: None,
        merge_seconds: Callable[[Merge], float] = lambda merge: 0.0,
        outages: Mapping[int, float] | None = None,
        before: tuple[Sequence[Durable], float] = ((), 0.0),
    ) -> None:
        log, self.began_s = before
        self.clock = Clock(self.began_s)
        self._config, self._outages = config, dict(outages or {})
        self._lives_from = functools.partial(
            VirtualCoordinator,
            config,
            self.clock,
            merging=merging,
            persist=self._persist,
            alert=alert,
            merge_seconds=merge_seconds,
        )
        self._log = list(log)
        """Records from which the coordinator comes back."""
        self.coordinator = self._lives_from(self._recovered())
        """Present life of the coordinator, or the last one while it is away."""
        self._merges = sum(f.merges for f in self.coordinator.state.fragments)
        self.away = False
        """True while no coordinator serves."""
        self.islands: dict[str, VirtualIsland] = {}
        """Newest incarnation of each island, by name."""
        self._run, self._report_s = run, report_s
        self._line_speed = line_speed or LineSpeed()
        self._make_body = make_body
        if self._log:
            self.coordinator.hear(RunResumed())

    def start(self, spec: IslandSpec) -> VirtualIsland:
        """Start a new incarnation of an island, which says hello."""
        incarnation, body = self.next_incarnation(spec.name), self._make_body(spec.name)
        island = VirtualIsland(
            spec, incarnation, self._run, self.clock, body, self._report_s
        )
        self.islands[spec.name] = island
        self.connect(island)
        return island

    def next_incarnation(self, name: str) -> int:
        """Return the incarnation as which an island of that name would start now."""
        before = self.islands.get(name) or self.coordinator.state.islands.get(name)
        return 1 if before is None else before.incarnation + 1

    def connect(self, island: VirtualIsland) -> None:
        """Give the island a line, on which it says hello; while no coordinator serves,
        it waits.
        """
        if not self.away:
            island.connect(self.coordinator, Line(self.clock, self._line_speed))

    def kill(self, name: str) -> None:
        """Kill the island's process; its connection breaks at once."""
        island = self.islands[name]
        island.die()
        if island.peer is not None:
            self.coordinator.disconnected(island.peer)

    def run(self, until: float = float("inf")) -> None:
        """Run until the run is over, at most until `until` (seconds)."""
        self.clock.run(until, lambda: self.coordinator.finished)

    # ---- failures of the coordinator -----------------------------------------------

    def _persist(self, record: Durable) -> None:
        self._log.append(record)
        if isinstance(record, Merged):
            self._merges += 1
            away_s = self._outages.get(self._merges)
            if away_s is not None:
                # Once the effects of the record are carried out: arrays are as the log
                # says. All that they send is still under way.
                self.clock.after(0.0, functools.partial(self._die, away_s))

    def _die(self, away_s: float) -> None:
        if self.away or self.coordinator.finished:
            return
        self.away = True
        self.coordinator.die()
        for island in self.islands.values():
            island.disconnect()
        self.clock.after(away_s, self._recover)

    def _recovered(self) -> State:
        """Return the state that the records so far say."""
        config = self._config
        if not self._log:
            return initial(config)
        return recovery.recover(config, initial(config), self._log, self.clock.now)

    def _recover(self) -> None:
        self.away = False
        self.coordinator = self._lives_from(self._recovered())
        for island in self.islands.values():
            if island.ended is None and island.line is None:
                self.connect(island)
