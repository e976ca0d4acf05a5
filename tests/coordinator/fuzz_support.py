"""A coordinator that is fed bytes: the wire's server, service, engine and a tiny store
in one thread and in virtual time. What it is fed can be fed again to another one."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
from door_support import ADMITTED, CONFIG, LAYOUTS, Coordinator, searching
from msgspec.structs import replace

from diloco_jax.config.placement import Deadlines
from diloco_jax.coordinator import lead as engine_thread
from diloco_jax.coordinator import service as answers
from diloco_jax.coordinator.holding.inbox import DELTAS_AT_ONCE
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.service import AnchorSearch
from diloco_jax.protocol.coordinator import recovery
from diloco_jax.protocol.coordinator.state import State, initial
from diloco_jax.wire import bulk, peers
from diloco_jax.wire.bulk import BulkConnection
from diloco_jax.wire.errors import ConnectionLost, Failure, WireError
from diloco_jax.wire.peers import IdleWatch, QueueClosed, Quota, RateLimitedLog
from diloco_jax.wire.server import Server
from diloco_jax.wire.session import Session

CHECK_EVERY = 250
"""Moves between two looks at books and memory."""
START = 1.0e6
FAILED = "the coordinator failed on this call"
UNIX = 1.8e9
"""Unix seconds at the start."""
MOST_STATE_BYTES = 64 << 10
TAPE_BYTES_PER_BYTE = 8
TAPE_BYTES_PER_MOVE = 4 << 10
"""Bytes that one move may write beside what it says."""


class Defect(AssertionError):  # noqa: N818
    """The coordinator broke a promise."""


class Move(NamedTuple):
    """One thing that happens. `frames`: bytes of a message, or of an upload, the first
    frame first; of "bulk", all that a connection carries. `fresh`: on a stream of its
    own."""

    kind: str
    who: str = ""
    frames: tuple[bytes, ...] = ()
    fresh: bool = False
    seconds: float = 0.0

    def __str__(self) -> str:
        said = [repr(raw[:200]) for raw in self.frames[:1]]
        with contextlib.suppress(Exception):
            fields = msgspec.msgpack.decode(self.frames[0])
            fields = {name: fields[name] for name in fields if name != "run"}
            said = [repr(fields)]
        chunks = f", {len(self.frames) - 1} chunks" if len(self.frames) > 1 else ""
        return f"{self.kind} {self.who} {self.seconds:g} s {' '.join(said)}{chunks}"


class Scenario(NamedTuple):
    """The beginning of a world. secure: callers have certificates."""

    secure: bool
    gathers: bool
    total_tokens: int


class Fed(BulkConnection):
    """A connection that carries these bytes, and then ends."""

    def __init__(self, who: str, octets: bytes) -> None:
        self.peer, self._who = f"peer {who}", who
        self.sent_bytes = self.received_bytes = 0
        self.between, self.parted = True, False
        self._head = memoryview(bytearray(bulk.HEADER_BYTES))
        self.unread, self.said = memoryview(octets), bytearray()

    @property
    def certificate(self) -> bytes:
        return self._who.encode()

    def spoken(self) -> bool:
        return False

    def part(self, message: Any) -> None:
        self.between, self.parted = False, True
        raw = bulk.encode(message)
        self._send(bulk.message_header(len(raw)) + raw)

    def drain(self, place: bytearray) -> bool:
        """Nothing more comes."""
        return False

    def _send(self, data: bytes | memoryview) -> None:
        self.said += data

    def _receive(self, place: memoryview) -> None:
        got, self.unread = self.unread[: len(place)], self.unread[len(place) :]
        place[: len(got)] = got
        if len(got) < len(place):
            raise ConnectionLost(f"{self.peer} ended the connection")


class World:
    """One coordinator, or one that gathers first, and the streams of its peers."""

    def __init__(self, scenario: Scenario, store: Store, folder: Path) -> None:
        self.scenario, self.store, self._folder = scenario, store, folder
        self.now, self.moves = START, 0
        self.streams: dict[str, Session] = {}
        self.heard: dict[str, list[Any]] = {}
        self._numbers, self._said_bytes = 0, 0
        self.answers: Counter[str] = Counter()
        """Kinds of what the bulk port answered."""
        self._config = replace(CONFIG, total_tokens=scenario.total_tokens)
        self._watch = IdleWatch("fuzz")
        self._server: Any = None
        self.coordinator: Coordinator | None = None
        self.gatherer: AnchorSearch | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[World]:
        """Begin, and check all at the end."""
        clock = SimpleNamespace(
            monotonic=lambda: self.now,
            time=lambda: UNIX + self.now - START,
            monotonic_ns=time.monotonic_ns,
        )
        modules = (engine_thread, answers)
        before = [module.time for module in modules]
        logging.disable(logging.ERROR)
        for module in modules:
            module.time = cast(Any, clock)
        try:
            if self.scenario.gathers:
                # It waits for one more until the deadline, and knows its run, as with
                # --run-id: of two runs with as many islands nobody could tell.
                config = replace(self._config, outage_budget_s=5.0)
                # Without certificates any of them may speak for all.
                names = {*ADMITTED, "late"} if self.scenario.secure else {"a", "b"}
                self.gatherer, self._holder = searching(config, frozenset(names))
                self._serve(self.gatherer)
            else:
                self._lead(initial(self._config))
            yield self
            self.check()
        finally:
            logging.disable(logging.NOTSET)
            for module, own in zip(modules, before, strict=True):
                module.time = own
            if self.coordinator is not None:
                self.coordinator.tape.close()
            self._watch.close(1.0)

    @property
    def state(self) -> State:
        return self.coordinator.state if self.coordinator else initial(self._config)

    def do(self, move: Move) -> None:
        """Make a move; raises what no peer may cause."""
        self.moves += 1
        # Nobody gathers anchors of islands that are all silent for a lease.
        longest = self._config.lease_s / 8 if self.coordinator is None else math.inf
        self.now += 0.01 + min(move.seconds, longest)
        self._said_bytes += sum(map(len, move.frames))
        if move.kind == "say":
            self._say(move)
        elif move.kind == "cut":
            self.cut(move.who)
        elif move.kind in ("upload", "fetch", "bulk"):
            self._transfer(move)
        elif move.kind == "ask":
            self._server._status()
        self._run()
        if self.moves % CHECK_EVERY == 0:
            self.check()

    def _transfer(self, move: Move) -> None:
        octets = b"".join(move.frames) if move.kind == "bulk" else carried(move)
        fed = Fed(move.who, octets)
        while fed.between and fed.unread:
            fed.between = False
            fed.said.clear()
            self._server._bulk.answer(fed)
            if fed.said:
                heard = Fed("coordinator", bytes(fed.said))
                reply = heard.receive(bulk.bulk_reply)
                if isinstance(reply, Failure) and FAILED in reply.message:
                    raise Defect(f"a transfer failed: {reply.message}")
                self.answers[type(reply).__name__] += 1

    def cut(self, who: str) -> None:
        """A peer's stream ends."""
        stream = self.streams.pop(who, None)
        if stream is not None:
            self._listen(who, stream)
            stream.close()
            if stream.connected:
                self._handlers.disconnect(stream)

    def check(self) -> None:
        """Raise Defect if books, memory or disk are not as they should be."""
        if self.coordinator is None:
            assert self.gatherer is not None
            json.dumps(self.gatherer.status(), allow_nan=False)
            waiting = self.gatherer._sessions
            rooms = self._holder.rooms
            most = 2 * len(ADMITTED) * sum(x.total_bytes for x in LAYOUTS)
            awaited = len(self._holder.lost._arriving)
            require(awaited <= len(LAYOUTS) * len(ADMITTED))
        else:
            made = self.coordinator
            made.keep_house(made.lead)
            require(set(made.state.islands) <= set(ADMITTED), "strangers are members")
            state_bytes = len(msgspec.msgpack.encode(made.state))
            require(state_bytes <= MOST_STATE_BYTES, f"state of {state_bytes} bytes")
            tape = made.tape.path.stat().st_size
            most = TAPE_BYTES_PER_BYTE * self._said_bytes
            most += TAPE_BYTES_PER_MOVE * self.moves
            require(tape <= most, f"tape of {tape} bytes, expected {most}")
            require(set(made.roster.members) <= set(ADMITTED), "strangers are measured")
            require(len(made.lead.journal.ignored_messages) <= 100, "kinds of ignored")
            waiting, rooms = made.sessions, made.inbox.rooms
            most = DELTAS_AT_ONCE * len(ADMITTED) * sum(x.total_bytes for x in LAYOUTS)
        held = rooms.memory_bytes
        require(held <= most, f"inbox has {held} bytes")
        served = len(waiting._waiting) + len(waiting._serving)
        require(served <= len(self.streams), f"{served} sessions are kept")

    # ---- inside ----------------------------------------------------------------

    @property
    def _handlers(self) -> Any:
        return self._server._handlers

    def _serve(self, handlers: Any) -> None:
        self._server = Server(
            "127.0.0.1:0",
            handlers,
            tls=None,
            deadlines=Deadlines(60.0),
            max_islands=len(ADMITTED),
            max_hosts=len(ADMITTED),
            bulk_channels=2,
        )
        self._server._watch = self._watch
        bulk = self._server._bulk
        bulk._watch.close(1.0)
        bulk._watch = self._watch
        if self.scenario.secure:
            known = SimpleNamespace(
                identify=lambda pem: peers.island(pem.decode()),
            )
            self._server._peers = bulk._peers = known

    def _lead(self, state: State) -> None:
        made = Coordinator(
            self._folder,
            store=self.store,
            config=self._config,
            state=state,
            house_every=CHECK_EVERY,
        )

        def fail(peer: Any, error: BaseException) -> None:
            raise Defect(f"no decision upon what {peer} said") from error

        made.lead._put_out = cast(Any, fail)
        self.coordinator = made
        self._serve(made.handlers)

    def _say(self, move: Move) -> None:
        who = move.who
        if move.fresh or who not in self.streams:
            self.cut(who)
            self._numbers += 1
            identify = (
                (lambda: peers.island(who)) if self.scenario.secure else lambda: None
            )
            context = SimpleNamespace(peer=lambda: f"peer {who}", cancel=lambda: None)
            self.streams[who] = Session(
                self._numbers,
                context,
                self._handlers,
                identify,
                Quota(who),
                RateLimitedLog(),
            )
        stream = self.streams[who]
        try:
            stream.take(move.frames[0])
        except WireError:
            self.cut(who)

    def _run(self) -> None:
        """Let the engine decide until nothing is left to decide at this time."""
        if self.coordinator is None:
            self._gather()
            return
        lead = self.coordinator.lead
        while not lead._queue.empty() or self._due(lead):
            lead._turn()
            if lead._failure is not None:
                raise Defect("an effect failed") from lead._failure
        for who, stream in list(self.streams.items()):
            self._listen(who, stream)

    def _due(self, thread: Any) -> bool:
        due = thread._next_deadline(thread.state, thread._now)
        return due is not None and due <= self.now

    def _gather(self) -> None:
        assert self.gatherer is not None
        thread = self.gatherer._thread
        while not (thread._queue.empty() and not self._due(thread)):
            thread._turn()
            if thread._stopping or thread._failure is not None:
                break
        for who, stream in list(self.streams.items()):
            self._listen(who, stream)
        if thread._failure is not None:
            raise Defect(f"an island ended the gathering: {thread._failure}")
        elif self.gatherer._found is not None:
            found = self.gatherer._found
            for name in list(self.streams):
                self.cut(name)
            if self.coordinator is not None:  # The end of a stream led here before.
                return
            with contextlib.suppress(queue.Empty):
                while True:
                    thread._queue.get_nowait()
            first = recovery.first_state(self._config, found)
            for anchor in found.anchors:
                arrays = self.store.arrays(anchor.fragment)
                self.store.load(anchor.fragment, arrays, anchor.version)
            self._lead(first)

    def _listen(self, who: str, stream: Session) -> None:
        """Decode what a peer is told."""
        heard = self.heard.setdefault(who, [])
        del heard[:-100]
        while True:
            try:
                raw = stream._outbox.get(0.0)
            except QueueClosed:
                if self.streams.get(who) is stream:
                    del self.streams[who]
                    if stream.connected:
                        self._handlers.disconnect(stream)
                    self._run()
                return
            if raw is None:
                return
            heard.append(bulk.from_coordinator(raw))


def require(holds: bool, what: str = "") -> None:
    if not holds:
        raise Defect(what)


def carried(move: Move) -> bytes:
    """Return the bytes that a connection carries for an upload or a fetch."""
    request, *chunks = move.frames
    return b"".join((bulk.message_header(len(request)), request, *chunks))
