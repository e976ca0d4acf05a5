"""The interface of the coordinator's half, its state, and its legal moves.

Events go in with a time; effects come out in the order in which the shell must carry
them out. A `Persist` is durable before any later effect of the same step is visible.
What a holder of fragments is told, and tells, is in `protocol/holding.py`. Only the
shell uses `Hello.run`, `plan`, `island_config` and `environment` and `Report.measures`.
A hello's `versions`, `tokens` and `next_position` are for a coordinator without its
state (`anchors.py`).

State is plain frozen values. An island's steps are settled fragment by fragment in an
`Account`: `[0, start)` is merged or lost, `[start, steps)` is open, and a `Take` covers
the first open steps. State that belongs to one fragment is in its `Fragment` and
nowhere else.

Every legal move is in a table (`MACHINES`), which docs/design/architecture.md draws.
Phases and statuses change only by `StateMachine.move`: a move that is in no table is a
bug in this package, and no message of a peer can cause it. A message that makes no move
in the current state changes nothing, and is counted as `Ignored`. `EXPECTED` lists
those that a lossy wire brings; any other shows that the two ends disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.islands import (
    NOBODY,
    Absences,
    Departed,
    Island,
    Islands,
)
from diloco_jax.protocol.holding import (
    CycleKept,
    DeltaArrived,
    MergePrepared,
    ToHolder,
)
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    Contribution,
    DonorFailed,
    FromCoordinator,
    Goodbye,
    Hello,
    LossReason,
    Refusal,
    Report,
    Span,
    Steer,
    Told,
    Version,
)
from diloco_jax.protocol.records import Durable, Noted

# ---- events -------------------------------------------------------------------


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """An island's next message on the stream of a session. Records come in order and
    may repeat. After a goodbye, only the deltas that have arrived are merged."""

    island: str
    session: str
    message: Report | Goodbye | DonorFailed


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed; due when `decide.next_deadline` says so."""


class MachineSlept(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's clock stood still, while islands went on. No deadline moves:
    nobody could be heard meanwhile."""

    seconds: float


class Disconnected(msgspec.Struct, frozen=True, kw_only=True):
    """A session's connection broke; the incarnation may return on a new one."""

    island: str
    session: str


class SaidAhead(msgspec.Struct, frozen=True, kw_only=True):
    """An island said hello that knows of a later state of the run, and was told to come
    again. how: as `members.how_ahead` says."""

    island: str
    how: str


class RunResumed(msgspec.Struct, frozen=True, kw_only=True):
    """The run continues after a stop: all its earlier processes have ended.

    `steps` holds the last reported steps, by name and incarnation, where known.
    """

    steps: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)


class RunExtended(msgspec.Struct, frozen=True, kw_only=True):
    """The run is over, and its config now asks for more tokens than it has."""


class KeepAsked(msgspec.Struct, frozen=True, kw_only=True):
    """An operator wants the parameters of one cycle: of the one that is being kept or,
    if none is, of the run's present cycle.
    """


Event = (
    Hello
    | Said
    | Steer
    | DeltaArrived
    | MergePrepared
    | Disconnected
    | SaidAhead
    | RunResumed
    | RunExtended
    | KeepAsked
    | CycleKept
    | MachineSlept
    | Timer
)

# ---- effects ------------------------------------------------------------------


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record durably to the log (and the tape), before any later effect."""

    record: Durable


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Write a record to the tape."""

    record: Noted


class Tell(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message to a session; nothing happens if it is not connected. A `Welcome`
    lets it in, a `Refused` ends it."""

    session: str
    message: FromCoordinator


class Ignored(msgspec.Struct, frozen=True, kw_only=True):
    """Count a message that made no move in its machine's state.
    expected: this happens on a lossy wire; otherwise the two ends disagree."""

    machine: str
    state: str
    message: str
    expected: bool


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Tell people about something that needs their attention. island: the one that it
    is about, which could raise it again and again; empty: none."""

    text: str
    island: str = ""


class Outdated(msgspec.Struct, frozen=True, kw_only=True):
    """End the coordinator, whose state is an old one."""

    text: str


Effect = Persist | Note | Tell | ToHolder | Ignored | Alert | Outdated

# ---- state --------------------------------------------------------------------

MISSED_MERGES = 10
"""Consecutive merges of one fragment without a live island, after which no merge
counts on its next delta."""
MERGES_KNOWN = 8
"""Merges of a fragment whose tokens are known, should its worker lose it."""
AVERAGE_KEPT = 0.8
"""Weight of the old value when a running average takes in a new one."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that decisions depend on. Sizes are in parameters, times in seconds. The
    names are those of a config's sections, `Placement` and `Deadlines`."""

    run_id: str
    fingerprint: str
    fragment_sizes: tuple[int, ...]
    steps_per_cycle: int
    overlap_steps: float
    quorum: int
    grace: float
    grace_window: Literal["alike", "overlap"]
    max_staleness: int
    partial_merges: Literal["scaled", "full"]
    total_tokens: int
    lease_s: float
    reunion_s: float
    compile_budget_s: float
    outage_budget_s: float
    flush_s: float
    delta_bound: float = 0.0
    rates: tuple[float, ...] = ()
    """Learning rates at equal distances of the run's progress, from 0 to 1."""
    quarantine_after: int = 0
    release_cycles: int = 1
    fruitless_starts: int = 0
    """Incarnations in a row that fail without a step, after which none is let in; 0 =
    any number."""
    workers: int = 1
    """Holders of fragments, see `holding.deal`."""
    export_every: int = 0
    """Cycles between two that are kept; 0 = none is, unless it is asked for."""
    watch_every: int = 0
    """An island watches the cycles that it divides; 0 = none."""
    admitted: dict[str, int | None] | None = None
    """Sequences per step of every admitted island, by name; None: as many as the island
    says. Without this dict any island is let in, with any batch."""
    hosts: dict[str, int] = {}
    """Hosts of every island that the config describes."""
    regions: dict[str, str] = {}
    """Region of every island that is in one with others."""
    sequence_length: int = 0
    """Tokens per sequence."""
    merge_buffer_bytes: int = 0
    """Memory for deltas that wait for their merge."""
    room_each: int = 0
    """Bytes of it that each admitted island needs; 0 = nobody counts them."""
    least_seconds: dict[str, float] = {}
    """Least seconds per sequence by island, that of any other one under ""."""

    @property
    def fragments(self) -> int:
        """Number of fragments, P."""
        return len(self.fragment_sizes)

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(self.fragment_sizes)


class Take(msgspec.Struct, frozen=True, kw_only=True):
    """One outstanding delta of an island for a fragment.

    asked -> taken (`end` known: the record is on the tape) and arrived (all bytes have
    arrived), in either order -> merged, or refused and then given up by the island.
    """

    tick: int
    start: int = 0
    end: int | None = None
    base: Version = FIRST_VERSION
    taken_at: float = 0.0
    rate_sum: float = 0.0
    """Sum of the learning rates of its steps, as the island says; 0: unknown."""
    arrived: bool = False
    norm: float = 0.0
    """Length of the delta; 0: unknown."""
    used: int = 0
    """Tokens behind its counts of use."""
    uses: str = ""
    """Digest of its counts of use."""
    refused: Refusal = ""
    after: int = 0
    """Boundaries by which the island was last asked to put it off."""

    @property
    def ready(self) -> bool:
        """True if the take can be merged."""
        return self.end is not None and self.arrived and not self.refused


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Books of one island for one fragment. Tokens are summed over incarnations."""

    incarnation: int
    session: str
    tokens_per_step: int
    start: int = 0
    carrying: bool = False
    """True while an incarnation from an earlier term has not said yet which of its
    steps are in that term's books."""
    take: Take | None = None
    told: Told | None = None
    merged_tokens: int = 0
    carried_tokens: int = 0
    """Tokens of steps that are in the books of earlier terms."""
    lost_tokens: dict[str, int] = msgspec.field(default_factory=dict)
    """By reason; `LossReason` names them all."""
    merges_in: int = 0
    merges_alive: int = 0
    missed_merges: int = 0
    """Consecutive merges that a live island was not in."""
    last: Contribution | None = None
    """The incarnation's last merged delta; `base_tokens` are in its base."""
    base_tokens: int = 0

    def lose(self, steps: int, reason: LossReason) -> Account:
        """Return the account with `steps` more steps lost."""
        return self.lose_tokens(steps * self.tokens_per_step, reason)

    def lose_tokens(self, tokens: int, reason: LossReason) -> Account:
        """Return the account with `tokens` more tokens lost."""
        if tokens <= 0:
            return self
        tokens += self.lost_tokens.get(reason, 0)
        return replace(self, lost_tokens={**self.lost_tokens, reason: tokens})


class MergedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens by island that the merge into a version has; none in the version with
    which a term begins."""

    version: Version
    by_island: dict[str, int] = msgspec.field(default_factory=dict)


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """One fragment: its version, the tick it is open for, its books and averages."""

    index: int
    version: Version = FIRST_VERSION
    phase: Literal["idle", "open", "merging", "done"] = "idle"
    tick: int = 0
    asked: tuple[str, ...] = ()
    """Islands whose deltas count towards the quorum."""
    put_off: bool = False
    """True if some take may be put off; see `fragments.hasten`."""
    newest: tuple[MergedTokens, ...] = (MergedTokens(version=FIRST_VERSION),)
    """The last `MERGES_KNOWN` merges, or fewer. What came after an older version is not
    known."""
    final: bool = False
    opened_at: float = 0.0
    quorum_at: float | None = None
    closes_at: float | None = None
    closed_at: float = 0.0
    merging: tuple[Contribution, ...] = ()
    merging_share: float = 1.0
    """Share of all tokens per second that is in the merge."""
    left_behind: tuple[Contribution, ...] = ()
    """Deltas of incarnations that said goodbye, for the next merge; one per island."""
    accounts: dict[str, Account] = msgspec.field(default_factory=dict)
    lost_in_all: int = 0
    """Tokens lost in all accounts together."""
    merges: int = 0
    solo_merges: int = 0
    """Consecutive merges of deltas from only one of several live islands."""
    unfit_deltas: int = 0
    """Deltas since the last merge that were not finite."""
    quorum_seconds: float = 0.0
    merge_seconds: float = 0.0
    transfer_seconds: float = 0.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state. It does not keep the time of the last event: events bring it."""

    term: int = 1
    """Term of the run. A fragment's is that of its last gathering."""
    term_name: str = ""
    """Drawn as the term opened; empty: the run's first one."""
    books: int = 1
    """Term with which these books began: in an earlier one the log was lost."""
    phase: Literal["running", "stopping", "flushing", "done"] = "running"
    deadline: float = 0.0
    """Time at which stopping or flushing ends in any case."""
    opens_at: float = 0.0
    """Time at which the flush opens one more fragment, whether there is room or not."""
    hangs_at: float = 0.0
    """Time at which what the flush waits for counts as hanging."""
    tick: int = 0
    ticks_reserved: int = 0
    """Ticks up to this one may have been asked for before a crash."""
    progress_tokens: int = 0
    carried_progress: int = 0
    """Tokens of progress of earlier terms, without the incarnations in these books;
    negative if the others' losses exceeded their progress."""
    reunion_until: float = 0.0
    """Time until which ticks wait for absent islands (see `schedule.reunite`)."""
    returning: tuple[str, ...] = ()
    """Islands of the term before that have not joined this one, and are about to."""
    islands: Islands = msgspec.field(default_factory=Islands)
    """By name: one entry for all incarnations. Only admitted names are let in."""
    admitted: tuple[str, ...] = ()
    """Islands that an operator let in, besides those of the config."""
    ahead: tuple[str, ...] = ()
    """Islands that know of a later state of the run; see `members.ahead`."""
    fragments: tuple[Fragment, ...] = ()
    kept_cycle: int = 0
    """The last cycle that was kept, or is being kept."""
    unkept: tuple[int, ...] = ()
    """Fragments that have not reached their versions of the cycle being kept."""
    keeping: bool = False
    """True until the cycle being kept is on disk."""
    watched_cycle: int = 0
    """The last cycle that an island was to watch."""
    watcher: str = ""
    """That island."""
    unwatched: tuple[int, ...] = ()
    """Fragments whose versions of that cycle it has not been told."""
    next_position: int = 0
    free_spans: tuple[Span, ...] = ()
    """Positions to grant again. They are granted first, so there are no more than what
    ended incarnations had left."""
    departed: tuple[Departed, ...] = ()
    absences: Absences = NOBODY
    """Islands that are absent, as far as people are told of them."""
    in_merges: dict[str, tuple[Span, ...]] = msgspec.field(default_factory=dict)
    """Steps of each island's incarnation that are in some fragment's merge. They are
    not the island's, so that a merge does not change islands."""


def initial(config: PolicyConfig) -> State:
    """Return the state of a run before its first event."""
    indices = range(config.fragments)
    return State(fragments=tuple(Fragment(index=index) for index in indices))


def from_builtins(written: Any) -> State:
    """Return a state from the Python builtins of which `msgspec.to_builtins` made it.

    Raises msgspec.ValidationError if they are not those of a state.
    """

    def islands(kind: type, written: Any) -> Islands:
        assert kind is Islands, kind
        return Islands(msgspec.convert(written, dict[str, Island]).values())

    return msgspec.convert(written, State, dec_hook=islands)


def with_island(state: State, island: Island) -> State:
    """Return the state with one island replaced or added."""
    return replace(state, islands=state.islands.having(island))


def with_fragment(state: State, fragment: Fragment) -> State:
    """Return the state with one fragment replaced."""
    fragments = list(state.fragments)
    fragments[fragment.index] = fragment
    return replace(state, fragments=tuple(fragments))


def with_account(fragment: Fragment, name: str, account: Account) -> Fragment:
    """Return the fragment with one account replaced or added."""
    accounts, lost = fragment.accounts, fragment.lost_in_all
    before = accounts.get(name)
    if before is None or before.lost_tokens is not account.lost_tokens:
        lost += sum(account.lost_tokens.values())
        lost -= sum(before.lost_tokens.values()) if before is not None else 0
    return replace(fragment, accounts={**accounts, name: account}, lost_in_all=lost)


def is_let_in(config: PolicyConfig, name: str, also: tuple[str, ...]) -> bool:
    """Tell whether the config, or an operator (`also`), lets in an island."""
    return config.admitted is None or name in config.admitted or name in also


def booked(fragment: Fragment, name: str, **changes: Any) -> Fragment:
    """Return the fragment with these fields of an account changed."""
    return with_account(fragment, name, replace(fragment.accounts[name], **changes))


def averaged(average: float, value: float) -> float:
    """Return a running average with one more value; the first value starts it."""
    return AVERAGE_KEPT * average + (1 - AVERAGE_KEPT) * value if average else value


S = TypeVar("S", bound=str)


class IllegalMoveError(AssertionError):
    """A move that is in no table."""


class StateMachine(NamedTuple, Generic[S]):
    """The legal moves of one machine. moves: the state after each move, by state."""

    name: str
    moves: Mapping[S, Mapping[str, S]]

    def move(self, state: S, move: str) -> S:
        """Return the state after a move; IllegalMoveError if the move is not legal."""
        after = self.moves[state].get(move)
        if after is None:
            legal = ", ".join(self.moves[state]) or "nothing"
            raise IllegalMoveError(
                f"{self.name} in state {state!r}: no move {move!r}, only {legal}"
            )
        return after

    def check(self, before: S, move: str, after: S) -> None:
        """Raise IllegalMoveError unless the move leads from `before` to `after`."""
        if self.move(before, move) != after:
            raise IllegalMoveError(
                f"{self.name} in state {before!r}: {move!r} led to {after!r}, but must "
                f"lead to {self.move(before, move)!r}"
            )


FragmentState = Literal["idle", "open", "merging", "done"]
TakeState = Literal["none", "asked", "taken", "arrived", "ready", "refused"]
IslandState = Literal["unknown", "live", "absent", "gone"]
RunState = Literal["running", "stopping", "flushing", "done"]

FRAGMENT: StateMachine[FragmentState] = StateMachine(
    "fragment",
    {
        "idle": {
            "tick": "open",
            "flush": "done",
            "recover": "idle",
            "begin term": "idle",
        },
        "open": {"close": "merging", "give up": "idle", "recover": "idle"},
        "merging": {"commit": "idle", "recover": "idle"},
        "done": {"recover": "done", "extend": "idle", "begin term": "idle"},
    },
)

TAKE: StateMachine[TakeState] = StateMachine(
    "take",
    {
        "none": {"ask": "asked", "record": "taken"},
        "asked": {"record": "taken", "bytes": "arrived", "refuse": "refused"},
        "taken": {"bytes": "ready", "refuse": "refused", "give up": "none"},
        "arrived": {"record": "ready", "refuse": "refused"},
        "ready": {"merge": "none", "refuse": "refused", "give up": "none"},
        "refused": {"record": "refused", "bytes": "refused", "give up": "none"},
    },
)
"""Moves of a take. The end of its incarnation removes a take in any state, and leaves
it behind if it is ready. A record without a request belongs to a take that was asked
for before a crash."""

ISLAND: StateMachine[IslandState] = StateMachine(
    "island",
    {
        "unknown": {"join": "live"},
        "live": {"fall silent": "absent", "end": "gone", "recover": "absent"},
        "absent": {"be heard": "live", "end": "gone", "recover": "absent"},
        "gone": {"join": "live", "recover": "gone"},
    },
)

RUN: StateMachine[RunState] = StateMachine(
    "run",
    {
        "running": {"stop": "stopping"},
        "stopping": {"flush": "flushing", "recover": "stopping"},
        "flushing": {"finish": "done", "recover": "stopping"},
        "done": {"extend": "running"},
    },
)

MACHINES: tuple[StateMachine[str], ...] = (FRAGMENT, TAKE, ISLAND, RUN)  # type: ignore[assignment]

EXPECTED: Mapping[tuple[str, str, str], str] = {
    ("take", "none", "bytes"): "the verdict was sent while the bytes were on their way",
    ("take", "none", "give up"): "it was booked before a crash, or at a goodbye",
    ("take", "asked", "give up"): "it belongs to an earlier take",
    ("take", "taken", "record"): "a hello told it already, or it is repeated",
    ("take", "ready", "record"): "a hello told it already, or it is repeated",
    ("take", "arrived", "bytes"): "the bytes were asked for again, and came twice",
    ("take", "ready", "bytes"): "the bytes were asked for again, and came twice",
    ("take", "refused", "record"): "it is repeated",
    ("take", "judged", "record"): "the verdict was sent before the record came",
    ("take", "refused", "bytes"): "the bytes were asked for again, and came twice",
    ("take", "carried", "record"): "it belongs to a take in an earlier term",
    ("island", "gone", "bytes"): "they belong to an incarnation that has ended",
    ("island", "gone", "disconnect"): "the island said goodbye, then disconnected",
    ("island", "absent", "disconnect"): "the island was silent before",
    ("island", "replaced", "disconnect"): "a newer incarnation has joined",
    ("island", "replaced", "goodbye"): "a newer incarnation has joined",
    ("island", "replaced", "failed donor"): "a newer incarnation has joined",
    ("run", "done", "report"): "the run ended while the report was on its way",
}
"""Reason for each (machine, state, message) that usually makes no move."""


def take_state(take: Take | None) -> TakeState:
    """Return the state that the fields of an outstanding take describe."""
    if take is None:
        return "none"
    if take.refused:
        return "refused"
    if take.end is None:
        return "arrived" if take.arrived else "asked"
    return "ready" if take.arrived else "taken"


def outstanding(fragment: Fragment, name: str) -> Take:
    """Return the take of an island that has one."""
    take = fragment.accounts[name].take
    assert take is not None
    return take


def take_moved(fragment: Fragment, name: str, move: str, **changes: Any) -> Fragment:
    """Return the fragment after a legal move of a take, which changes these fields."""
    before = outstanding(fragment, name)
    take = replace(before, **changes)
    TAKE.check(take_state(before), move, take_state(take))
    return booked(fragment, name, take=take)


T = TypeVar("T", bound=msgspec.Struct)


class OneStep(Generic[T]):
    """One step under way: the state so far, and the effects in their order."""

    def __init__(self, config: PolicyConfig, state: T, now: float) -> None:
        self.config, self.state, self.now = config, state, now
        self.effects: list[Any] = []

    def set(self, **fields: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **fields)

    def tell(self, session: str, message: FromCoordinator) -> None:
        """Send a message to a session."""
        self.effects.append(Tell(session=session, message=message))

    def alert(self, text: str, island: str = "") -> None:
        """Tell people; see `Alert`."""
        self.effects.append(Alert(text=text, island=island))


class Turn(OneStep[State]):
    """One step of the coordinator's half.

    A function that is given a fragment returns it as it is after that, and leaves the
    state alone; any other changes the state.
    """

    def put(self, changed: Island | Fragment) -> None:
        """Replace one island or fragment of the state."""
        if isinstance(changed, Island):
            self.state = with_island(self.state, changed)
        else:
            self.state = with_fragment(self.state, changed)

    def persist(self, record: Durable) -> None:
        """Write a record durably before any later effect."""
        self.effects.append(Persist(record=record))

    def note(self, record: Noted) -> None:
        """Write a record to the tape."""
        self.effects.append(Note(record=record))

    def ignore(self, machine: str, state: str, message: str) -> None:
        """Count a message that makes no move in this state."""
        expected = (machine, state, message) in EXPECTED
        self.effects.append(
            Ignored(machine=machine, state=state, message=message, expected=expected)
        )
