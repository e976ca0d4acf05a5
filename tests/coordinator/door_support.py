"""A coordinator without network and threads, and peers that are only messages."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from diloco_jax.config import (
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
    shared_fields,
)
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.holding.anchors import LostFragments
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    Publishes,
)
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.holding.inbox import Inbox, Rooms
from diloco_jax.coordinator.lead import Lead, Sessions
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.service import AnchorSearch, Likeness, Service
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout, plan_fragments
from diloco_jax.faults import Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.search import Aim
from diloco_jax.protocol.coordinator.state import (
    PolicyConfig,
    State,
    Timer,
    from_builtins,
    initial,
)
from diloco_jax.wire import bulk
from diloco_jax.wire.bulk import decoded
from diloco_jax.wire.errors import Refused, WireError

SHAPES = {"w": (4, 4), "v": (4, 2)}
PLAN = plan_fragments(SHAPES, {"w": ("embed", "mlp"), "v": ("embed", "mlp")}, 2)
RUN = RunConfig(
    sequence_length=4,
    total_tokens=6000,
    outer=OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9),
    sync=SyncConfig(
        fragments=2,
        steps_per_cycle=4,
        overlap_steps=1,
        codec_up="f32",
        codec_down="f32",
    ),
)
ADMITTED: dict[str, int | None] = {"a": 2, "b": 4, "c": None}
CONFIG = policy_config(RUN, Placement(), "r", PLAN.sizes, admitted=ADMITTED)
STEP_S = 0.1
SHARED = shared_fields(RUN)
LAYOUTS = [PayloadLayout.of(get_codec("f32"), pieces) for pieces in PLAN.fragments]


class Stream:
    """Stands in for `wire.session.Session`: what is sent is encoded, and counted."""

    peer = "test"

    def __init__(self, hello: messages.Hello) -> None:
        self.hello = hello
        self.refused: list[Refused] = []

    def send(self, message: messages.FromCoordinator) -> None:
        bulk.from_coordinator(bulk.encode(message))

    def close(self, refused: Refused | None = None) -> None:
        self.refused += [refused] if refused else []

    def fail(self, error: WireError) -> None:
        """Likewise, with an error."""


class AtOnce:
    """An executor without a thread."""

    def submit(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(work(*arguments, **options))
        return future


class Coordinator:
    """The real service and lead, without network and threads. store: None where no
    delta comes."""

    def __init__(
        self,
        folder: Any,
        *,
        store: Any = None,
        config: PolicyConfig = CONFIG,
        state: State | None = None,
        house_every: int = 1,
    ) -> None:
        self._config, self._every, self._turns = config, house_every, 0
        self.roster = Roster(folder / f"roster-{time.monotonic_ns()}")
        self.tape = Tape(folder / f"tape-{time.monotonic_ns()}.jsonl")
        self.sessions = Sessions()
        self.inbox = Inbox(LAYOUTS, Rooms(1 << 20))
        log: Any = SimpleNamespace(append=lambda line: json.dumps(line))
        metrics = SimpleNamespace(append=lambda line: json.dumps(line, allow_nan=False))
        holder = StoreHolder(
            store,
            self.inbox,
            Publishes(folder / f"publishes-{time.monotonic_ns()}"),
            snapshots_of(set()),
            cast(Any, None),
            write_within_s=math.inf,
        )
        holder._merger = cast(Any, AtOnce())
        self.lead = Lead(
            config,
            state or initial(config),
            holder=holder,
            log=log,
            tape=self.tape,
            metrics=cast(Metrics, metrics),
            sessions=self.sessions,
            faults=Faults(()),
            slow_s=math.inf,
            housekeeping=self.keep_house_now_and_then,
        )
        self.handlers = Service(
            likeness=Likeness(RUN, PLAN),
            lead=self.lead,
            holder=holder,
            sessions=self.sessions,
            roster=self.roster,
            metrics=cast(Metrics, metrics),
            kept_cycles=cast(Any, None),
            time_budget_s=1.0,
            shown=dict,
        )

    @property
    def state(self) -> State:
        return self.lead.state

    def keep_house_now_and_then(self, lead: Lead) -> None:
        self._turns += 1
        if self._turns % self._every == 0:
            self.keep_house(lead)

    def keep_house(self, lead: Lead) -> None:
        """Do the coordinator's regular work, the end's and a snapshot's; check that the
        books balance."""
        self.roster.save()
        shown = {"alerts": [], "now": 1e9}
        status = summary.status(
            self._config, self.state, self.roster, seconds=1.0, **shown
        )
        json.dumps(status, allow_nan=False)
        result = summary.summary(
            self._config, self.state, self.roster, wall_seconds=1.0, **shown
        )
        json.dumps(result, allow_nan=False)
        from_builtins(msgspec.msgpack.decode(msgspec.msgpack.encode(self.state)))
        assert ledger.check(self.state) == []

    def run(self) -> None:
        while not self.lead._queue.empty():
            self.lead._turn()


def snapshots_of(lost: set[int]) -> FragmentSnapshots:
    """Snapshots whose checks are real, of which none is written."""
    made = FragmentSnapshots.__new__(FragmentSnapshots)
    made.fragments, made.lost, made.away = (0, 1), lost, set()
    cast(Any, made).begin = lambda *_: None
    return made


class AnchorHolder:
    """The real places of anchors; they are kept on no disk."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.snapshots = snapshots_of({0, 1})
        self.lost = LostFragments(
            cast(Any, SimpleNamespace(plan=PLAN, first=self._first)),
            self.snapshots,
            cast(Any, None),
            rooms,
            threading.Event(),
            submit=lambda job: job(),
            tell=lambda told: self._tell(told),
        )
        self.upload_begin, self.upload_end = self.lost.begin, self.lost.end
        self.hold = self.lost.expect

    def answer(self, tell: Any, failed: Any) -> None:
        self._tell = tell

    def completed(self, hello: Any, message: Any) -> Any:
        return message

    def _first(self, fragment: int, values: Any) -> Any:
        return {"anchor": [np.array(value).ravel() for value in values]}


def searching(
    config: PolicyConfig = CONFIG,
    names: frozenset[str] = frozenset(ADMITTED),
    admitted: tuple[str, ...] = (),
) -> tuple[AnchorSearch, AnchorHolder]:
    """A coordinator that has lost its state, and the holder of its anchors."""
    holder = AnchorHolder(Rooms(1 << 20))
    aim = Aim(lost=(0, 1), names=names, admitted=admitted)
    made = AnchorSearch(RUN, config, PLAN, aim, lambda run, term: cast(Any, holder))
    return made, holder


class Gathering:
    """The real search, likewise."""

    def __init__(self, **aim: Any) -> None:
        self.handlers, self.holder = searching(**aim)
        self.thread = self.handlers._thread
        self.state = initial(CONFIG)

    @property
    def over(self) -> bool:
        return self.thread.state.phase == "over"

    def run(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                event, before, peer, _ = self.thread._queue.get_nowait()
                peer = peer or self.thread._peer(event)
                self.thread._handle(event, before, peer)
        self.thread._handle(Timer(), None, None)
        json.dumps(self.handlers.status(), allow_nan=False)


class Peer:
    """An island that is nothing but its messages; honest, unless told otherwise."""

    def __init__(self, name: str, made: Coordinator | Gathering) -> None:
        self.name, self.made = name, made
        self.stream: Stream | None = None

    def hello(self, changed: dict[str, Any]) -> None:
        default = hello_fields(
            self.name,
            incarnation=self.incarnation(),
            session=self.name,
            steps=self.steps(),
        )
        message = self.decode("Hello", {**default, **changed})
        self.stream = Stream(message)
        self.made.handlers.connect(message, cast(Any, self.stream))

    def report(self) -> dict[str, Any]:
        return {"phase": "training", "steps": self.steps(), "step_seconds": 0.1}

    def steps(self) -> int:
        island = self.made.state.islands.get(self.name)
        return 0 if island is None or island.status == "gone" else island.steps

    def incarnation(self) -> int:
        """The next one, where the last one ended."""
        island = self.made.state.islands.get(self.name)
        if island is None:
            return 1
        return island.incarnation + (island.status == "gone")

    def identity(self) -> dict[str, Any]:
        return {
            "run_id": "r",
            "island": self.name,
            "incarnation": self.incarnation(),
            "session": self.name,
            "fragment": 0,
        }

    def upload(self, changed: dict[str, Any]) -> None:
        total = LAYOUTS[0].total_bytes
        default = {**self.identity(), "tick": 1, "offset": 0, "length": total}
        fields = {**default, "total": total, **changed}
        start = decoded(bulk.bulk_request, raw("UploadStart", fields), "p")
        place = self.made.handlers.upload_begin(start)
        place[:] = bytes(len(place))
        self.made.handlers.upload_end(start, place)

    def decode(self, kind: str, fields: dict[str, Any]) -> Any:
        return decoded(bulk.from_island, raw(kind, fields), "p")


def raw(kind: str, fields: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"type": kind, **fields})


def hello_fields(name: str, **changed: Any) -> dict[str, Any]:
    """The fields of an island's hello."""
    sequences = ADMITTED.get(name) or 3
    return {
        "run_id": "",
        "fingerprint": RUN.fingerprint(),
        "run": SHARED,
        "plan": PLAN.digest(),
        "island": name,
        "island_config": {"batch_size": sequences},
        "incarnation": 1,
        "session": name,
        "environment": {"jax": "0", "devices": 1},
        "tokens_per_step": sequences * RUN.sequence_length,
        "sequences_per_step": sequences,
        "phase": "training",
        "steps": 0,
        "step_seconds": STEP_S,
        "outstanding": [],
        "sequences_granted": 0,
        "records_through": 0,
        "term": 0,
        "versions": [],
        "tokens": 0,
        "own_tokens": 0,
        "next_position": 0,
        "lookahead": 0,
        **changed,
    }
