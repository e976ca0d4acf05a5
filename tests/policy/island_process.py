"""One incarnation of an island in the miniature world, and its connection.

It follows the island's side of the protocol with the real `island.books`: records are
repeated until acknowledged, deltas are kept until their verdict is final.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from diloco_jax.island.books import Books
from diloco_jax.policy.events import (
    AskResend,
    AskTake,
    DeltaArrived,
    Effect,
    Event,
    Finish,
    Grant,
    Hello,
    Phase,
    Progress,
    Publish,
    Record,
    Refuse,
    Report,
    StopStepping,
    TellVerdict,
    Version,
    Welcome,
)

if TYPE_CHECKING:
    from world import World

REPORT_S = 3.0
"""An island says at least this often that it lives."""


class Connection:
    """Messages under way, both ways; gone when it breaks."""

    def __init__(self) -> None:
        self.up: collections.deque[tuple[float, Event]] = collections.deque()
        self.down: collections.deque[tuple[float, Effect]] = collections.deque()
        self.deltas: list[tuple[float, DeltaArrived]] = []
        self.fetches: list[tuple[float, int, Version]] = []
        self.open = True


class Process:
    """One incarnation of an island, following the island's side of the protocol."""

    def __init__(self, world: World, name: str, incarnation: int, speed: float) -> None:
        self.world, self.name, self.incarnation = world, name, incarnation
        self.speed = speed
        self.tokens, self.sequences = world.sizes[name]
        self.session = f"{name}.{incarnation}"
        self.phase: Phase = "joining"
        self.steps = 0
        self.next_step_at = world.now + world.rng.uniform(0, 3)
        self.reconnect_at = self.report_at = world.now
        self.link: Connection | None = None
        self.books: Books | None = None
        self.records: list[Record] = []
        self.spans: list[tuple[int, int]] = []
        self.granted = 0
        self.requests: dict[int, int] = {}
        self.verdicts: list[tuple[int, int, Any, str]] = []
        self.arrivals: dict[int, Version] = {}
        self.stop = self.ended = False

    # ---- its network --------------------------------------------------------------

    def connect(self) -> None:
        """Says hello on a new connection."""
        self.link = Connection()
        outstanding = self.books.outstanding() if self.books else ()
        self.send(
            Hello(
                island=self.name,
                incarnation=self.incarnation,
                session=self.session,
                run_id="run",
                fingerprint="f",
                tokens_per_step=self.tokens,
                sequences_per_step=self.sequences,
                steps=self.steps,
                step_seconds=self.speed if self.steps > 1 else 0.0,
                phase=self.phase,
                outstanding=outstanding,
                sequences_granted=self.granted,
            )
        )

    def send(self, event: Event) -> None:
        if self.link is not None:
            self.link.up.append((self.world.soon(), event))

    def report(self) -> None:
        """The state of the loop, with every record that is not acknowledged."""
        if self.books is None:
            return
        self.report_at = self.world.now + REPORT_S
        self.records += self.books.drain()
        self.send(
            Report(
                island=self.name,
                session=self.session,
                phase=self.phase,
                steps=self.steps,
                step_seconds=self.speed if self.steps > 1 else 0.0,
                records=tuple(self.records),
            )
        )

    def upload(self, fragment: int, tick: int) -> None:
        if self.link is None:
            return
        event = DeltaArrived(
            island=self.name,
            incarnation=self.incarnation,
            fragment=fragment,
            tick=tick,
            refusal="unfit" if self.world.chance(0.02) else "",
        )
        self.link.deltas.append((self.world.soon(3), event))

    def receive(self, effect: Effect) -> None:
        """A message of the coordinator."""
        match effect:
            case Welcome():
                if self.books is None:
                    self.books = Books(effect.versions, self.world.rule)
                for fragment, version in enumerate(effect.versions):
                    self.fetch(fragment, version)
            case Refuse():
                self.ended = True
            case AskTake():
                self.requests[effect.fragment] = effect.tick
            case AskResend():
                held = self.books.outstanding() if self.books else ()
                if any(
                    (t.fragment, t.tick) == (effect.fragment, effect.tick) for t in held
                ):
                    self.upload(effect.fragment, effect.tick)
            case TellVerdict():
                self.verdicts.append(
                    (effect.fragment, effect.tick, effect.verdict, effect.reason)
                )
                self.fetch(effect.fragment, effect.version)
            case Publish():
                if self.name in effect.verdicts:
                    self.verdicts.append((effect.fragment, *effect.verdicts[self.name]))
                self.fetch(effect.fragment, effect.version)
            case Grant():
                assert effect.offset <= self.granted, "a gap in what was granted"
                if effect.offset == self.granted:
                    self.spans.append(effect.span)
                    self.granted += effect.span.stop - effect.span.start
            case Progress():
                through = effect.records_through
                self.records = [r for r in self.records if r.seq > through]
            case StopStepping():
                self.stop = True
            case Finish():
                self.ended = True

    def fetch(self, fragment: int, version: Version) -> None:
        assert self.link is not None
        assert self.books is not None
        if version > self.books.version(fragment):
            self.link.fetches.append((self.world.soon(2), fragment, version))

    # ---- its train loop -----------------------------------------------------------

    def boundary(self) -> None:
        """Verdicts, then adoptions and takes in the order of the rule, then a step."""
        if self.books is None:
            return
        if self.phase == "joining":
            self.phase = "compiling"
        elif self.phase == "compiling":
            self.phase = "training"
        for fragment, tick, verdict, reason in self.verdicts:
            self.books.settle(fragment, tick, verdict, reason, self.steps)
        self.verdicts = []
        if self.world.rule == "rebase":
            self.adopt()
        self.take()
        if self.world.rule != "rebase":
            self.adopt()
        if self.stop and self.phase == "training":
            self.phase = "stopped"
        if (
            self.phase == "training"
            and self.granted >= (self.steps + 1) * self.sequences
        ):
            self.steps += 1
        self.report()

    def adopt(self) -> None:
        assert self.books is not None
        for fragment, version in self.arrivals.items():
            self.books.adopt(fragment, version, self.steps)
        self.arrivals = {}

    def take(self) -> None:
        assert self.books is not None
        for fragment, tick in list(self.requests.items()):
            if self.books.must_wait(fragment):
                continue
            del self.requests[fragment]
            take = self.books.take(fragment, tick, self.steps)
            if take is not None:
                self.world.taken(self, take)
                self.upload(fragment, tick)
