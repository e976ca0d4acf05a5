"""What the train loop and the network threads leave for each other.

One lock, held for moments; nothing in here touches the network or a device. The loop
never waits in `collect` or `post`; only `wait` waits, and the live loop does not call
it while it trains. Bounded: one take request and one arrival per fragment (an arrival
holds at most MAX_CHAIN publishes), verdicts on takes that are outstanding, records
until the coordinator has them (takes, grants and adoptions end when it is away).
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.messages import Measures, TakeVerdict
from diloco_jax.protocol.reasons import EndReason
from diloco_jax.protocol.values import Outstanding, Phase, Record, Span, Version

MAX_CHAIN = 8
"""Publishes of one fragment that may wait for the loop."""
MAX_RECORDS_PER_REPORT = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrival:
    """A newer version of a fragment, on the device and ready to be adopted.

    Either `anchor` is A_v in full, or `publishes` lead to it from the version before:
    encoded, oldest first. Both are by piece, in the plan's order.
    """

    fragment: int
    version: Version
    anchor: tuple[Any, ...] | None = None
    publishes: tuple[tuple[Any, ...], ...] = ()

    def followed_by(self, later: Arrival) -> Arrival:
        """Both as one."""
        if later.anchor is not None:
            return later
        return dataclasses.replace(
            self, version=later.version, publishes=(*self.publishes, *later.publishes)
        )


class Ending(NamedTuple):
    """Why the loop must end now: `text` for people, `reason` for the books."""

    exit_code: int
    text: str
    reason: EndReason = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inbox:
    """What came in since the last look, and is to be acted upon at this boundary."""

    takes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tick by fragment."""
    put_off: int = 0
    """Boundaries by which these takes are put off."""
    arrivals: tuple[Arrival, ...] = ()
    verdicts: tuple[TakeVerdict, ...] = ()
    grants: tuple[Span, ...] = ()
    anchors: tuple[int, ...] = ()
    """Fragments whose anchors are to be sent."""
    term: int = 0
    """A new term began, and with it new books; 0: none did."""
    others_tokens: int = 0
    """Of the other islands, and of this one's earlier incarnations."""
    heard: int = 0
    """How often the coordinator has answered so far."""
    again: bool = False
    """Look once more before the next step."""
    save: bool = False
    """Have a checkpoint written of what is after this boundary."""
    stop: bool = False
    """The run has its tokens, or the island is about to leave: no more steps."""
    leaving: bool = False
    """It is about to leave: have a checkpoint written, and answer takes only."""
    finished: bool = False
    """The run is over."""
    ending: Ending | None = None
    """The loop must end."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where the loop is; what Hello and Report say."""

    phase: Phase = "joining"
    steps: int = 0
    outstanding: tuple[Outstanding, ...] = ()
    versions: tuple[Version, ...] = ()
    """Of the anchors, as they are or are about to be."""
    records_through: int = 0
    """Records up to this number are acknowledged."""
    tokens: int = 0
    """Progress of the run, as last heard."""
    next_position: int = 0
    """Up to which data was granted to anybody, as far as was heard."""
    measures: Measures = Measures()


class Mailbox:
    """Between one train loop and its network threads. All methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._news = self._news_collected = 0
        self._takes: dict[int, int] = {}
        self._newest_take: dict[int, int] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._verdicts: list[TakeVerdict] = []
        self._grants: list[Span] = []
        self._anchors: list[int] = []
        self._term = self._put_off = 0
        self._delivered: dict[int, Version] = {}
        self._others_tokens = self._tokens = self._next_position = 0
        self._heard = 0
        self._stop = self._leaving = self._may_leave = self._finished = False
        self._ending: Ending | None = None
        self._status = Status()
        self._records: list[Record] = []
        self._records_through = 0
        self._traffic = {"bytes_up": 0, "bytes_down": 0, "bytes_join": 0}
        self._traffic_of: dict[int, dict[str, int]] = {}

    # ---- the loop's side --------------------------------------------------------

    def collect(self) -> Inbox:
        """Takes everything out. Does not wait."""
        with self._lock:
            inbox = Inbox(
                takes=self._takes,
                put_off=self._put_off,
                arrivals=tuple(self._arrivals.values()),
                verdicts=tuple(self._verdicts),
                grants=tuple(self._grants),
                anchors=tuple(self._anchors),
                term=self._term,
                others_tokens=self._others_tokens,
                heard=self._heard,
                stop=self._stop or self._leaving,
                leaving=self._leaving,
                finished=self._finished,
                ending=self._ending,
            )
            self._takes, self._arrivals = {}, {}
            self._verdicts, self._grants, self._anchors = [], [], []
            self._term = self._put_off = 0
            self._news_collected = self._news
            self._changed.notify_all()
            return inbox

    def post(self, status: Status, records: tuple[Record, ...] = ()) -> None:
        """Says where the loop is, together with what happened up to there."""
        with self._lock:
            self._status = status
            self._records.extend(records)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Returns when something came in after the last `collect`, or in time."""
        with self._lock:
            self._changed.wait_for(
                lambda: self._news != self._news_collected, timeout_s
            )

    def leave(self) -> None:
        """The island is about to leave: no more steps, takes are answered."""
        with self._lock:
            self._leaving = True
            self._tell_loop()

    @property
    def leaving(self) -> bool:
        """It is about to leave."""
        with self._lock:
            return self._leaving

    def wait_to_leave(self, timeout_s: float) -> bool:
        """Returns once it is let go, or ends anyway; False if not in time."""
        with self._lock:
            return self._changed.wait_for(
                lambda: self._may_leave or self._ending is not None, timeout_s
            )

    @property
    def stop_asked(self) -> bool:
        """The run has its tokens, or the island is about to leave: no more steps."""
        with self._lock:
            return self._stop or self._leaving

    @property
    def finished(self) -> bool:
        """The run is over."""
        with self._lock:
            return self._finished

    @property
    def ending(self) -> Ending | None:
        """Set when the loop must end at the next boundary; the first reason stands."""
        with self._lock:
            return self._ending

    # ---- the network's side -----------------------------------------------------

    def request_take(self, fragment: int, tick: int, after: int = 0) -> None:
        """The newest request for a fragment replaces an older one, which may come
        late, and a second time. after: boundaries by which it is put off."""
        with self._lock:
            if tick >= self._newest_take.get(fragment, tick):
                self._takes[fragment] = self._newest_take[fragment] = tick
                self._put_off = after
                self._tell_loop()

    def deliver(self, arrival: Arrival, timeout_s: float) -> bool:
        """Hands over an arrival; False if the loop did not make room in time."""

        def room() -> bool:
            waiting = self._arrivals.get(arrival.fragment)
            return (
                waiting is None
                or arrival.anchor is not None
                or len(waiting.publishes) + len(arrival.publishes) <= MAX_CHAIN
            )

        with self._lock:
            if not self._changed.wait_for(room, timeout_s):
                return False
            if (waiting := self._arrivals.get(arrival.fragment)) is not None:
                arrival = waiting.followed_by(arrival)
            self._arrivals[arrival.fragment] = arrival
            self._delivered[arrival.fragment] = arrival.version
            self._tell_loop()
            return True

    def judge(self, verdict: TakeVerdict) -> None:
        """What became of a take."""
        with self._lock:
            if verdict not in self._verdicts:
                self._verdicts.append(verdict)
            self._tell_loop()

    def grant(self, span: Span) -> None:
        """Positions of data, after those granted before."""
        with self._lock:
            self._grants.append(span)
            self._next_position = max(self._next_position, span.stop)
            self._tell_loop()

    def request_anchor(self, fragment: int) -> None:
        """The coordinator has lost its state, and asks for what is here of it."""
        with self._lock:
            if fragment not in self._anchors:
                self._anchors.append(fragment)
            self._tell_loop()

    def new_term(self, term: int) -> None:
        """The coordinator lost its state, and began anew from anchors: what was asked
        for and judged before, and not looked at yet, is of no account."""
        with self._lock:
            self._term = term
            self._takes, self._verdicts = {}, []
            self._stop = False
            self._tell_loop()

    def heard(self, tokens: int, next_position: int) -> None:
        """How far the run is, and its data: to be told to a coordinator that lost its
        state."""
        with self._lock:
            self._tokens = tokens
            self._next_position = max(self._next_position, next_position)

    def progress(self, others_tokens: int, records_through: int) -> None:
        """The other islands' tokens; records up to that number are forgotten."""
        with self._lock:
            self._heard += 1
            self._others_tokens = others_tokens
            self._records = [r for r in self._records if r.seq > records_through]
            self._records_through = max(self._records_through, records_through)

    def forget_records(self) -> None:
        """Another host of the island reports them."""
        with self._lock:
            self._records = []

    def stop(self) -> None:
        """The run has its tokens."""
        with self._lock:
            self._stop = True
            self._tell_loop()

    def let_go(self) -> None:
        """The coordinator has all that it could ask for."""
        with self._lock:
            self._may_leave = self._leaving
            self._changed.notify_all()

    def finish(self) -> None:
        """The run is over."""
        with self._lock:
            self._stop = self._finished = True
            self._tell_loop()

    def end(self, exit_code: int, text: str, reason: EndReason = "failed") -> None:
        """Ends the loop at its next boundary."""
        with self._lock:
            self._ending = self._ending or Ending(exit_code, text, reason)
            self._tell_loop()

    def count(self, **nbytes: int) -> None:
        """Adds to bytes_up, bytes_down or bytes_join."""
        with self._lock:
            for name, value in nbytes.items():
                self._traffic[name] += value

    def traffic(self) -> dict[str, int]:
        """What this host counted so far."""
        with self._lock:
            return dict(self._traffic)

    def count_of(self, host: int, traffic: dict[str, int]) -> None:
        """What another host of the island counted so far; may come out of order."""
        with self._lock:
            before = self._traffic_of.get(host, {})
            self._traffic_of[host] = {
                name: max(value, before.get(name, 0)) for name, value in traffic.items()
            }

    def status(self) -> Status:
        """The last one posted, with the traffic of all hosts so far, and with versions
        that wait for the next boundary."""
        with self._lock:
            current = self._current()
            versions = [
                max(version, self._delivered.get(fragment, version))
                for fragment, version in enumerate(current.versions)
            ]
            return replace(current, versions=tuple(versions))

    def report(self, sent_through: int) -> tuple[Status, tuple[Record, ...]]:
        """The status, and the next records after number `sent_through`."""
        with self._lock:
            fresh = (r for r in self._records if r.seq > sent_through)
            return self._current(), tuple(fresh)[:MAX_RECORDS_PER_REPORT]

    def wait_for_post(
        self, seen: Status, sent_through: int, timeout_s: float
    ) -> Status:
        """Returns once phase or steps differ from `seen`, or records are unsent."""

        def posted() -> bool:
            now = self._status
            return (
                (now.phase, now.steps) != (seen.phase, seen.steps)
                or bool(self._records and self._records[-1].seq > sent_through)
                or self._ending is not None
            )

        with self._lock:
            self._changed.wait_for(posted, timeout_s)
            return self._current()

    def _current(self) -> Status:
        """As `status`, but for versions: this is asked for at every boundary."""
        traffic = self._traffic
        if self._traffic_of:
            hosts = [traffic, *self._traffic_of.values()]
            traffic = {name: sum(host[name] for host in hosts) for name in traffic}
        return replace(
            self._status,
            measures=replace(self._status.measures, **traffic),
            records_through=self._records_through,
            tokens=self._tokens,
            next_position=self._next_position,
        )

    def _tell_loop(self) -> None:
        self._news += 1
        self._changed.notify_all()
